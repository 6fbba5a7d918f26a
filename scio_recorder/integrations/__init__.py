"""The recorder with other tools; a file that imports a tool needs the extra of its name."""
