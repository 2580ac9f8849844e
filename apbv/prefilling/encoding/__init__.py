"""A prompt's images, videos and sound as embeddings, on the hosts that need them."""
