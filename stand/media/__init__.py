"""What prompts show besides tokens: images, videos, sound."""
