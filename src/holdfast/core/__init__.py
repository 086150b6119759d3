"""What a checkpoint is, as plain data: no torch, no files. Every function here can be tested with numbers alone."""
