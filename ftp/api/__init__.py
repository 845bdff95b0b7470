"""The public functions: shard, spmd, lower, certify, reshard, init_params. Orders the passes."""
