"""Where the files of requests are from, and how large they can be."""
