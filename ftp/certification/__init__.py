"""The independent checker: reads the traced program and the ranks' programs, and no plan."""
