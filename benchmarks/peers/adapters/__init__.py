"""One module per software: its losses, called as it calls them, with parameters named by what they read."""
