"""What a rank says of itself, where others can read it, and what is made of it in words."""
