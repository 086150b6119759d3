"""What all diffusion recipes share: flags, data, optimizers, the one loop, the export."""
