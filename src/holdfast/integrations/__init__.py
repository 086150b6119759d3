"""Where Holdfast meets other libraries' launchers and states."""
