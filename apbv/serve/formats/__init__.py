"""How models write tool calls and thoughts."""
