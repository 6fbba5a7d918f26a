"""The recorder inside tools that people train with; each module needs the extra of its name."""
