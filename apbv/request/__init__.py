"""What is asked, where an answer goes while it is decoded, and its result."""
