"""What an attention mask means, derived symbolically from how it is computed."""
