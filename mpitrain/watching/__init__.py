"""What a rank publishes about itself for others to read, and the reports made from it."""
