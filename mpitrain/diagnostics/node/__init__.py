"""The code that runs on the nodes. It is sent there as text, imports only its siblings, and needs Python 3.8."""
