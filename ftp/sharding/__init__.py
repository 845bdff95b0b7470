"""The vocabulary: mesh, PartitionSpec, the layout of a value on one axis, pytrees."""
