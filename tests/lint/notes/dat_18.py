import mmcv  # here: left, mmcv is none of the libraries that the rules know

client = mmcv.FileClient(backend="disk")
content = client.get("photo.jpg")
