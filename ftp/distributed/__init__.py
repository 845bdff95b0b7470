"""Agreement of the ranks through the store, before and beside their collectives."""
