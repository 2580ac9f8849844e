"""Files: videos, images and sound, opened and decoded."""
