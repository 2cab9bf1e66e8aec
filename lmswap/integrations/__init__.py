"""Other libraries' trainers: a callback for each, in a file that imports it."""
