"""An HTTP server in front of one engine: the interfaces that coding agents speak, and a page for people."""
