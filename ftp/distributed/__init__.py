"""Agreement of the ranks through the store, before and during their collectives."""
