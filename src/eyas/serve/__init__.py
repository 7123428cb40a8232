"""An OpenAI-compatible server, and the page that shows every cycle."""
