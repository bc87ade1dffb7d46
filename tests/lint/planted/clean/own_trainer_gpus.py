class Trainer:
    def __init__(self, gpus=0, resume_from_checkpoint=None):
        self.gpus = gpus
        self.resume = resume_from_checkpoint

    def training_epoch_end(self, outputs):
        return sum(outputs) / len(outputs)


trainer = Trainer(gpus=2, resume_from_checkpoint="last.ckpt")
print(trainer.training_epoch_end([1, 2, 3]))
