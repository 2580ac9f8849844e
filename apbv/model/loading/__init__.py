"""From a checkpoint to a model: its files, adapters, quantized weights, and shards."""
