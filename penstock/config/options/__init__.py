"""Groups of options of ``penstock serve``. Those of listening, keys, TLS, logs, shutdown and tracing are the
gateway's as well; ``connection`` is that of commands which ask a running server.

:class:`penstock.config.serve.ServeConfig` puts them side by side and checks combinations.
"""
