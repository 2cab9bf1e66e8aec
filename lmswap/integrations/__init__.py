"""Callbacks for other libraries' trainers, one per file, which imports that library."""
