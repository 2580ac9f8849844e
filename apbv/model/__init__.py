"""Loading an unmodified transformers model, taking it apart, and giving it an attention of ours."""
