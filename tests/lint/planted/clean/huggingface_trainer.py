from transformers import Trainer, TrainingArguments


def main(model, train_set, eval_set):
    args = TrainingArguments("out", num_train_epochs=3, fp16=True)
    trainer = Trainer(model=model, args=args, train_dataset=train_set, eval_dataset=eval_set)
    trainer.train(resume_from_checkpoint=True)
    return trainer.evaluate()
