"""For authors of engine adapters and for tests: the contract suite, and a server that answers as engines do.

``engine_contract`` needs pytest.
"""
