"""``hexad serve``: a model behind OpenAI's interface."""
