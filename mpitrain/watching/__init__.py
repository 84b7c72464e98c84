"""What a rank publishes about itself, where others can read it, and the reports made from it."""
