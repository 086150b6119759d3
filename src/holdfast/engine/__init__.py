"""Saving and loading: the only part of Holdfast that touches both a training loop and a disk. Imports torch, no Hugging Face."""
