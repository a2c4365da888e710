"""`make amd-check`: what can be said about the AMD build without an AMD GPU."""
