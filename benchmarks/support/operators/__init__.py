"""This package defines what operators are measured on, checks them, and times them."""
