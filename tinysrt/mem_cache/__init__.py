"""KV memory: pools and allocators (chapter 8), the prefix tree and the caches over it (chapter 9).

numpy only, but for KVPool; knows neither requests nor messages.
"""
