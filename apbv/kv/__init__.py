"""Keys and values: where they lie, how they are gathered, and how they are kept on disk."""
