"""The unmodified transformers model: how it is loaded, taken apart, and given an attention of ours."""
