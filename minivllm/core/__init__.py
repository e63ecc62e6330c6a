"""DECIDES, without tensors: specs, groups, block hashes, the block pool, managers, the scheduler."""
