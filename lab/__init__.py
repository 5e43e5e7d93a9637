"""Around the lesson: settings, flags, runs that are measured and kept, folders, processes, tables and pictures."""
