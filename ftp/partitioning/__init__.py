"""Pass 4, partition: a plan and a coordinate to one rank's graph, with its collectives."""
