"""Handlers of messages: from ingresses, from workers about requests, and about processes."""
