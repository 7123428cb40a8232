"""Messages with images, sounds or videos, as prompts. The model reads them by `targets.media`."""
