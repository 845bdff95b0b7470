"""Reports on a program before it runs: memory, collectives, time, lint. Nothing here changes it."""
