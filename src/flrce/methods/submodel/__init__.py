"""Which coordinates does a client hold?"""
