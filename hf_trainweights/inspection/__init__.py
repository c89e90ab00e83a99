"""What lies in weight files and checkpoints, and by how much two of them differ."""
