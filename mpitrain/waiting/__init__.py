"""How ranks wait for each other: every wait can say what it waits for, and hears of ranks that fail."""
