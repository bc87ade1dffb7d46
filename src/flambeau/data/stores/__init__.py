"""Objects in a store (a bucket, a web server) as local files are: addresses, requests, a cache of blocks."""
