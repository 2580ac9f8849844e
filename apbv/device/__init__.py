"""Copies between CPU and GPU without synchronization, and memory that is kept."""
