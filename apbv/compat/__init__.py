"""What the installed packages differ in, and what they need."""
