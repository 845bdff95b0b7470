"""Pass 3, plan: a graph and specs to a layout for every value, one mesh axis at a time."""
