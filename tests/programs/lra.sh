#!/bin/sh
# lra.sh: examples/lra/lra.c from outside, on small tasks made here: its five tasks, every attention (without TEST_FULL
# a few), a training that goes on, tables, bad files.
# Needs $BUILD/lra.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
name=lra_sh program=lra
. tests/programs/cli_checks.sh
small="--settings quick --layers 1 --dim 8 --heads 2 --memory 4 --ffn 16 --batch 4 --steps 20 --validations 10"
small="$small --threads 2"
# an awk program that prints octal numbers
bytes() { awk "$1" | sed 's/[0-9][0-9]*/\\0&/g' | tr -d '\n ' >octal; printf '%b' "$(cat octal)"; }

awk 'BEGIN { split("[MIN [MAX [MED [SM", op, " ")
  for (i = 0; i < 80; i++) { a = i * 7 % 10; b = i * 3 % 10; lo = a < b ? a : b; hi = a < b ? b : a
    answer = i % 4 == 0 ? lo : i % 4 == 1 ? hi : i % 4 == 2 ? int((a + b) / 2) : (a + b) % 10
    print answer "\t" op[i % 4 + 1] " " a " " b " ]" } }' >lists
awk -F '\t' 'BEGIN { print "Source\tTarget" } { sub(/\[/, "( ( [", $2); print $2 " )\t" $1 }' lists >release
awk 'BEGIN { for (i = 0; i < 60; i++) {
  s = ""; for (k = 0; k < 5 + i % 9; k++) s = s (i % 2 ? " good" : " bad"); print i % 2 "\tfilm" s } }' >texts
awk -F '\t' '{ print ($1 ? "1.0" : "0.0") "\tid1\tid2\t" $2 "\t" (NR % 3 ? $2 : "other") }' texts >pairs
awk -F '\t' '{ print $1 "\t" $2 "\tother" }' texts >pairs3
bytes 'BEGIN { for (i = 0; i < 20; i++) { print i % 2; for (k = 0; k < 1024; k++) print i % 2 ? 377 : 20 } }' >gray
bytes 'BEGIN { for (i = 0; i < 10; i++) { print i % 2; for (k = 0; k < 3072; k++) print k < 1024 ? 377 : 0 } }' >colour
image='BEGIN { for (i = 0; i < 20; i++) { print i % 2; for (k = 0; k < 1024; k++) print '
awk 'BEGIN { for (i = 0; i < 200; i++) print "plain text, line " i }' >text
printf 1 >one_byte
: >empty
mkdir folder runs

# ---- a run, its files, and the same again
train="train listops --data lists $small --save-every 7 --dropout 0.1"
check "lra train succeeds" run $train --out whole --plot loss.svg
check "it prints its settings" grep -q '^steps 20, batch 4, .*layers 1, dim 8, ' out
check "plain lines when the output is no terminal" grep -q '^step   18/20 loss .* validation [0-9.]*% .* left$' out
check "the last one is the best model's accuracy" \
  grep -q '^whole.safetensors: Training made 20 steps .* Accuracy on 4 samples that chose it: [0-9.]*%; on 4 unto' out
check "beside its standard error" grep -q 'untouched ones [0-9.]*%, standard error [0-9.]* (loss' out
check "its files are there" [ "$(echo whole.*)" = "whole.csv whole.safetensors whole.training whole.txt" ]
check "the loss is drawn" drawn loss.svg
check "the curve has a row a step" [ "$(wc -l <whole.csv)" = 21 ]
check "each of the four numbers or none" [ "$(grep -c '^[0-9]*,[0-9.]*,[0-9.]*,[0-9.]*$' whole.csv)" = 20 ]
check "ten of them with a validation" [ "$(grep -c '^[0-9]*,[0-9.]*,[0-9.][0-9.]*,[0-9.]*$' whole.csv)" = 10 ]
check "the report says what it was" \
  [ "$(grep -c -E '^(task listops|system Luna-4|settings quick|seed 1|steps 20|of 20|batch 4|held 4)$' whole.txt)" = 8 ]
run $train --out other --threads 1
check "the same seed gives the same model, for any number of threads" same whole.safetensors other.safetensors
run $train --out other --seed 2
check "another seed gives another one" differ whole.safetensors other.safetensors

# ---- it goes on from step 14 to the same bits
cp whole.csv on.csv
cp whole.safetensors on.safetensors
cp whole.training on.training && cp whole.training early.training
check "a training goes on" run train listops --data lists --resume on.training --save-every 20
check "it says from where" grep -q '^The training of on.training is resumed after step 14' out
run $train --out other --save-every 20
check "to the same bits" \
  sh -c "LC_ALL=C; export LC_ALL; sed 's/lra.run.*//' on.training >a; sed 's/lra.run.*//' other.training >b; cmp a b"
check "its best model is the same" same other.safetensors on.safetensors
check "and its curve" same whole.csv on.csv
refuses "is not there" train listops --data lists --resume early.training --out nothing
rm -f other.* on.*
mkdir my.training && cp whole.csv whole.safetensors my.training && cp early.training my.training/whole.training
: >my.training/whole.csv
check "in any folder, and without its curve" run train listops --data lists --resume my.training/whole.training
check "it says that it saves no checkpoints" grep -q 'resumed after step 14. It saves no checkpoints, as --save' out
check "which begins anew" [ "$(head -n 2 my.training/whole.csv | tail -n 1 | cut -d , -f 1)" = 15 ]
growing="--valid lists --longest 64 --steps 30 --validations 1"
check "a training whose lists grow" run train listops $small $growing --save-every 20 --out grown
cp grown.csv other.csv
check "goes on from any step" run train listops --valid lists --resume grown.training
check "with the same lists" same grown.csv other.csv
# 2,000 lists, of the first 500 of which, those that validations look at, the answers are wrong
awk -F '\t' '{ line[NR] = $0 } END { for (i = 0; i < 2000; i++) {
  split(line[i % 80 + 1], c, "\t"); print (i < 500 ? (c[1] + 5) % 10 : c[1]) "\t" c[2] } }' lists >wrong
check "the last model is measured too" \
  run train listops --data lists --valid wrong $small --steps 300 --lr 0.01 --save-every 300 --out last
check "and kept where it is better" \
  grep -q 'model of step 300 is the best. Accuracy on 1000 samples that chose it: [45]' out
check "what did not choose it is right far more often" \
  awk '/untouched/ { sub(/.*untouched ones /, ""); exit !($1 + 0 > 80) }' out
run eval last.training --data wrong
cp out other
run eval last.safetensors --data wrong
check "as the file's model is" [ "$(sed 's/^[^:]*: //' out)" = "$(sed 's/^[^:]*: //' other)" ]
check "nothing is left beside it" [ ! -e last.safetensors.probe ]
rm -f last.*
head -n 70 lists >lists70
refuses "began with other samples" train listops --resume early.training --out whole
refuses "began with other samples" train listops --data lists70 --resume early.training --out whole
sed 's/7 ]/8 ]/' lists >lists8
refuses "began with other samples" train listops --data lists8 --resume early.training --out whole
refuses "was 8 in the training of whole.training" train listops --data lists --resume whole.training --dim 16
refuses "of another task" train text --data texts --resume whole.training
refuses "holds no training" train listops --data lists --resume whole.safetensors
LC_ALL=C sed 's/"lra.keep"/"lra.kept"/' early.training >older.training
check "a checkpoint of a program without a flag" differ early.training older.training
refuses "began without --keep" train listops --data lists --resume older.training --keep 0.5
cp whole.csv older.csv
cp whole.safetensors older.safetensors
check "is resumed with the flag's default" run train listops --data lists --resume older.training
check "to the same curve" same whole.csv older.csv
for flag in step dim hidden lr; do
  LC_ALL=C sed "s/\"lra.$flag\"/\"lra.${flag%?}_\"/" early.training >older.training
  refuses "holds no training" train listops --data lists --resume older.training
done
refuses "[a-z]" train listops --data lists --resume text

# ---- self-pretraining
learns="train text --data texts $small --steps 4 --validations 1 --lr 1e-9 --out t"
check "lra pretrain succeeds" run pretrain text --data texts $small --steps 120 --lr 0.02 --save-every 60 --out words
check "it tells what was found" \
  grep -q '^words.safetensors: Training made 120 steps .* Masked tokens found in 6 samples that chose it: ' out
check "most of what is masked here can be told" awk -F '[: %]+' '/^words.safetensors/ { exit !($(NF - 3) > 60) }' out
check "it is no row of a table" [ ! -e words.txt ]
check "a training begins with it" run $learns --begin words.safetensors
check "and says what it takes" grep -q '^3[0-9] of 3[0-9] tensors were taken from words.safetensors' out
check "its report says so too" grep -q '^model .*, begun with another model$' t.txt
LC_ALL=C tail -c 20000 t.safetensors >begun
run $learns
check "it is another model then" sh -c "LC_ALL=C tail -c 20000 t.safetensors | cmp -s - begun; [ \$? = 1 ]"
refuses "is a pre-training" train text --data texts --resume words.training
refuses "a training by labels" pretrain listops --data lists --resume whole.training
refuses "has no classes" eval words.safetensors --data texts
refuses "is not there\|cannot be opened" $learns --begin nothing.safetensors
rm -f t.* words.*

# ---- pixels as numbers
bits() { LC_ALL=C sed 's/lra.run.*//' "$1.training" >a && LC_ALL=C sed 's/lra.run.*//' "$2.training" >b && cmp a b; }
bytes "$image int(k / 32) % 2 * 20 + (k % 32 == 5 ? i % 2 * 100 : 7) } }" >uneven
numbers="--data gray $small --pixels number --lr 0.02"
check "images of numbers" run train image $numbers --shift 3 --steps 60 --save-every 40 --out numbers
check "are read standardised, not as they are" sh -c '! grep -q "are read as they are" out'
check "are learnt" sh -c "sed -n 's/^accuracy //p' numbers.txt | awk '{ exit !(\$1 > 80) }'"
check "pixels and shifts are among the settings" grep -q '^model .*positions grid.* shift 3, pixels number' numbers.txt
check "what is off is not" sh -c '! grep -q "segment\|masked\|grays\|trial" numbers.txt'
check "its model is measured" run eval numbers.safetensors --data gray
moving="--data uneven $small --validations 1 --pixels number --lr 0.01 --shift 3 --mirror yes"
run train image $moving --steps 45 --save-every 40 --out numbers
cp numbers.training on.training && cp numbers.safetensors on.safetensors
check "a training on moved images goes on" run train image --data uneven --resume on.training --save-every 45
check "as if it had never ended" same on.safetensors numbers.safetensors
run train image $moving --steps 45 --save-every 45 --out numbers
check "to the same bits" bits on numbers
for shift in 0 3; do
  run train image --data uneven --settings quick --steps 2 --batch 4 --validations 1 --threads 1 --shift $shift \
    --out shift$shift
  cut -d , -f 1,2 shift$shift.csv >shift$shift
done
check "images that are moved have another loss" differ shift0 shift3
for decay in constant cosine; do
  for steps in 10 20; do
    check "decay $decay" run train image $numbers --warmup 2 --decay $decay --steps $steps --validations 1 --out decay
    cut -d , -f 1,2 decay.csv | head -n 11 >$decay$steps
  done
done
check "a constant rate knows nothing of the steps to come" same constant10 constant20
check "another one does" differ cosine10 cosine20
# pre-training: what is hidden in pictures of one gray can be told from the rest
check "hidden pixels" run pretrain image $numbers --steps 60 --save-every 40 --out hidden
check "half of them, of 16 grays" grep -q 'masked 0.5, grays 16' out
check "are told" awk -F '[: %]+' '/^hidden.safetensors/ { exit !($(NF - 3) > 90) }' out
cp hidden.training on.training && cp hidden.safetensors on.safetensors
check "their training goes on" run pretrain image --data gray --resume on.training --save-every 60
run pretrain image $numbers --steps 60 --save-every 60 --out hidden
check "to its bits" bits on hidden
check "256 grays" run pretrain image $numbers --steps 1 --masked 0.25 --grays 256 --out hidden256
check "are classes of their own" grep -q 'masked 0.25, grays 256' out
check "a training begins with the encoder" \
  run train image $numbers --steps 4 --validations 1 --begin hidden.safetensors --out t
check "all of it" grep -q '^\([0-9]*\) of [0-9]* tensors were taken from hidden.safetensors' out
taken=$(sed -n 's/ of .* tensors were taken from hidden.*//p' out)
all=$(sed -n 's/^[0-9]* of \([0-9]*\) tensors.*/\1/p' out)
check "but for the layers of the classes" [ "$((all - taken))" = 2 ]
refuses "for image alone" train text --data texts --shift 2 --out bad
refuses "for image and pathfinder alone" train text --data texts --pixels number --out bad
refuses "for pathfinder alone" train image --data gray --pixels number --segment 1 --out bad
refuses "needs --pixels number" train pathfinder --settings quick --segment 1 --out bad
refuses "are for pretrain" train image --data gray --pixels number --masked 0.3 --out bad
refuses "are for pretrain" train image --data gray --pixels number --grays 256 --out bad
refuses "needs --pixels number" pretrain image --data gray --grays 256 --out bad
rm -f numbers* on.* shift* hidden* decay.* constant* cosine* t.*

# ---- pictures with a second loss, and runs that learn nothing: --trial ends them before all that is held is measured
second="--settings quick --difficulty easy --longest 300 --layers 1 --dim 8 --heads 2 --memory 4 --ffn 16 --batch 4"
second="$second --threads 2"
second="$second --pixels number --segment 1 --segment-for 0.2 --steps 240 --validations 1 --lr 0.01"
check "a second loss" run train pathfinder $second --trial 30 --trial-loss 0.01 --save-every 9 --out second
check "is among the settings" grep -q 'segment 1, segment-for 0.2' out
check "a run that has learnt nothing ends" \
  grep -q '^second: The run was stopped at step 30 by --trial, as its loss of .* is above 0.01' out
check "the second loss is in the curve" [ "$(head -n 1 second.csv | sed 's/.*,//')" = segment_loss ]
check "in each row" [ "$(grep -c '^[0-9]*,[0-9.]*,,,[0-9.][0-9.]*$' second.csv)" = 15 ]
sed -n 's/^second: //p' out >ended
cp second.csv whole.second
cp second.training on.training
cp second.csv on.csv
check "it goes on" run train pathfinder --resume on.training --save-every 30
sed -n 's/^on: //p' out >ended_again
check "and ends again, with the same loss" same ended ended_again
check "and the same curve" same whole.second on.csv
run train pathfinder $second --trial 30 --trial-loss 0.01 --save-every 30 --out second
check "and the same bits" bits on second
sed 's/,[^,]*$//' second.csv >a
run train pathfinder $second --segment 0 --trial 30 --trial-loss 0.01 --out second
check "without it other things are learnt" differ a second.csv
check "and there is no column of it" [ "$(head -n 1 second.csv)" = "step,loss,validation_loss,validation_accuracy" ]
# coordinates as features, and only some of the dark pixels
few="$(echo "$second" | sed 's/--longest 300/--longest 1025/') --positions coordinates --dark 0.1"
check "few dark pixels" run train pathfinder $few --trial 24 --trial-loss 0.01 --save-every 9 --out few
check "are among the settings" grep -q 'positions coordinates.* dark 0.1' out
cp few.training on.training
cp few.csv on.csv
check "a training of them goes on" run train pathfinder --resume on.training --save-every 24
run train pathfinder $few --trial 24 --trial-loss 0.01 --save-every 24 --out few
check "to the same bits" bits on few
cut -d , -f 2 few.csv >few_losses
run train pathfinder $few --trial 24 --trial-loss 0.01 --dark 1 --out few
cut -d , -f 2 few.csv >all_losses
check "whole pictures have other losses" differ few_losses all_losses
run train pathfinder $few --trial 24 --trial-loss 0.01 --dark 1 --positions grid --out few
cut -d , -f 2 few.csv >grid_losses
check "and learnt positions others again" differ all_losses grid_losses
# only some of the pixels of images
thin="$small --longest 1025 --pixels number --positions coordinates --keep 0.1 --mirror yes --shift 2"
thin="image --data gray $thin --steps 24 --validations 1"
check "some pixels of images" run train $thin --save-every 9 --out thin
check "are among the settings" grep -q 'positions coordinates.* keep 0.1' out
cp thin.training on.training
cp thin.csv on.csv
check "a training of them goes on" run train image --data gray --resume on.training --save-every 24
run train $thin --save-every 24 --out thin
check "to the same bits" bits on thin
cut -d , -f 2 thin.csv >thin_losses
run train $thin --keep 1 --out thin
cut -d , -f 2 thin.csv >all_losses
check "whole images have other losses" differ thin_losses all_losses
check "coordinates of images" run train image --data gray $small --steps 4 --validations 1 --pixels number \
  --positions coordinates --out few
check "are in no table of positions" sh -c '! grep -aq embed_positions few.safetensors'
refuses "coordinates needs --pixels number" train image --data gray --positions coordinates --out bad
refuses "dark is for pathfinder alone" train image --data gray --pixels number --dark 0.5 --out bad
refuses "keep is for image alone" train pathfinder --settings quick --keep 0.5 --out bad
refuses "keep needs --positions coordinates" train image --data gray --pixels number --keep 0.5 --out bad
refuses "dark needs --positions coordinates" train pathfinder --settings quick --pixels number --dark 0.5 --out bad
# where the slots look
check "lra draw" run draw few.safetensors --data gray --sample 3 --plot few.svg
check "draws four slots" [ "$(grep -c '^<text .*>slot [1-4]</text>$' few.svg) $(tail -n 1 few.svg)" = "4 </svg>" ]
check "whose places are numbers" sh -c '! grep -q -i "nan\|inf" few.svg'
refuses "no layer 2" draw few.safetensors --data gray --layer 2
refuses "no sample 20" draw few.safetensors --data gray --sample 20
run train image --data gray $small --steps 1 --validations 1 --out tokens
check "lra draw of grays that are tokens" run draw tokens.safetensors --data gray --plot tokens.svg
run train image --data gray $small --attention linear --steps 1 --validations 1 --out linear
refuses "has no memory slots" draw linear.safetensors --data gray
run train image --data gray $small --longest 300 --steps 1 --validations 1 --out part
refuses "reads 299 of a picture's 1024 pixels" draw part.safetensors --data gray
rm -f tokens* linear* part*
# a model in 8 bits
check "lra quantize" run quantize few.safetensors --out few8.safetensors
check "stores a matrix in 8 bits" grep -aq '"dtype":"I8"' few8.safetensors
check "in fewer bytes" [ "$(wc -c <few8.safetensors)" -lt "$(wc -c <few.safetensors)" ]
check "and all that lra says of it" run eval few8.safetensors --data gray
sed 's/few8/few/' out >plain
run eval few.safetensors --data gray
check "with much the same loss" sh -c "sed 's/.*loss //; s/)//' plain out | awk '{ x[NR] = \$1 }
  END { exit !(NR == 2 && (x[1] - x[2]) ^ 2 < 0.0025) }'"
refuses "needs --out" quantize few.safetensors
rm -f second* on.* whole.second few* all_losses grid_losses

# ---- several seeds
seeds="--data gray $small --pixels number --steps 10 --validations 2 --lr 0.01"
for seed in 4 5 6; do run train image $seeds --seed $seed --out one-$seed; done
check "several seeds" run train image $seeds --seeds 4-6 --save-every 5 --out several
check "have a run each" [ "$(grep -c '^several-[456].safetensors: Training made 10 steps' out)" = 3 ]
for seed in 4 5 6; do
  check "seed $seed is what a command of its own makes" same one-$seed.safetensors several-$seed.safetensors
  check "with its curve" same one-$seed.csv several-$seed.csv
done
check "a seed each" [ "$(cat several-?.txt | grep '^seed' | tr '\n' ' ')" = "seed 4 seed 5 seed 6 " ]
check "to go on from the first of them" run train image --data gray --resume several-4.training --seeds 4-5
check "which is finished" grep -q 'This training is finished' out
check "makes the next one" grep -q '^several-5.safetensors: Training made 10 steps' out
check "and no more" sh -c '! grep -q "several-6" out'
check "as it was" same one-5.safetensors several-5.safetensors
check "runs that have not moved" run train image $seeds --lr 1e-9 --seeds 1-3 --trial 5 --trial-loss 0.5 --out still
check "end, one after the other" [ "$(grep -c '^still-[123]: The run was stopped at step 5 by --trial' out)" = 3 ]
check "one that has" run train image $seeds --steps 60 --lr 0.02 --seeds 1-2 --trial 55 --trial-loss 0.5 --out moved
check "is made to its end" [ "$(grep -c '^moved-[12].safetensors: Training made 60 steps' out)" = 2 ]
check "names without --out" run train image --data gray $small --steps 1 --validations 1 --seeds 8-9
check "have the seed at their end" [ -s image-quick-luna4-8.txt ] && [ -s image-quick-luna4-9.txt ]
refuses "FIRST-LAST" train image $seeds --seeds 3-1 --out bad
refuses "leave one of them out" train image $seeds --seeds 1-3 --seed 2 --out bad
refuses "leave --seeds out" train image $seeds --seeds 1-3 --plot p.svg --out bad
refuses "none of --seeds" train image --data gray --resume several-4.training --seeds 5-6
rm -f one-* several-* still-* moved-* image-quick*

# ---- interrupted before the first validation
stopped() {
  "$build/$program" train listops --data lists $small --steps 1000000 --validations 1 --out stop >out 2>err & pid=$!
  tries=0
  until [ -s stop.csv ] || [ $tries = 120 ]; do sleep 1; tries=$((tries + 1)); done
  kill -"$1" $pid; wait $pid
}
check "SIGTERM ends a training" stopped TERM
check "which says how to go on" grep -q ' --resume stop.training resumes it' out
check "and holds what it has learnt" grep -aq 'lra.run' stop.training
rm -f stop.*

# ---- names of runs
cp texts t.txt && cp texts t.csv
refuses "is that of --data" train text --data t.txt $small --out t
refuses "is that of --data" train text --data ./t.txt $small --out t
refuses "is that of --valid" train text --data texts --valid t.csv $small --out t
refuses "is that of --plot" train text --data texts $small --plot t.safetensors --out t
check "files that are read stay" sh -c 'cmp texts t.txt && cmp texts t.csv'
rm -f t.*
cp whole.safetensors begun.safetensors
refuses "is that of --begin" train listops --data lists $small --begin begun.safetensors --out begun
refuses "is that of --begin" train listops --data lists $small --begin ./begun.safetensors --out begun
check "the model that a training begins with stays" same whole.safetensors begun.safetensors
rm -f begun.*
refuses "names no run" train text --data texts $small --out ''
refuses "names no run" train text --data texts $small --out folder/
check "and has no files" [ "$(echo .[a-z]* folder/.[a-z]*)" = ".[a-z]* folder/.[a-z]*" ]
check "a run without a name" run train text --data texts $small --batch 1 --steps 1 --validations 1
check "is called by its task, settings, system and seed" [ -s text-quick-luna4-1.txt ]
[ -z "$TEST_FULL" ] || {                                 # it draws 20,000 pictures to validate on
  check "pictures" run train pathfinder --difficulty easy --longest 40 $small --batch 1 --steps 1 --validations 1
  check "with their difficulty in the name" [ -s pathfinder-easy-quick-luna4-1.txt ]
}

# ---- tasks and their files
check "lra eval succeeds" run eval whole.safetensors --data lists
check "it gives the accuracy" grep -q 'ListOps. Accuracy on 80 samples of lists: [0-9.]*%' out
sed 's/.*lists://' out >plain
run eval whole.safetensors --data release
check "the release's lines are the same lists" [ "$(sed 's/.*release://' out)" = "$(cat plain)" ]
check "lra show listops counts" run show listops --data lists
check "whether answers are right" grep -q '^Of 80 lists 80 have the right answer.$' out
for task in "text --data texts" "retrieval --data pairs" "retrieval --data pairs3" "image --data gray"; do
  check "train $task" run train $small $task --out t
  check "eval $task" run eval t.safetensors ${task#* }
done
beyond_half() { sed -n 's/^accuracy //p' t.txt | awk '{ exit !($1 > 80) }'; }
check "texts are learnt" run train text --data texts $small --steps 60 --lr 0.02 --pooling mean --out t
check "beyond chance" beyond_half
cut -f 1,2 texts | head -n 12 >valid
check "a file to validate on" run train text --data texts --valid valid $small --out t
check "half of it chooses, the rest is measured" grep -q '^held 6$' t.txt
learns="train text --data texts $small --steps 60 --validations 4 --lr 0.02 --pooling cls"
attentions="luna reformer performer" settings=sinkhorn
[ -z "$TEST_FULL" ] || {
  attentions="luna softmax local sparse longformer linformer reformer sinkhorn synthesizer bigbird linear"
  attentions="$attentions performer rfa workspace isab" settings="local sparse longformer reformer sinkhorn performer"
}
for attention in $attentions; do
  check "--attention $attention" run $learns --attention $attention --out t
  check "CLS sees the text with $attention" beyond_half
  check "its model is measured" run eval t.safetensors --data texts
done
for attention in $settings; do
  check "--settings lra for $attention" run $learns --settings lra --longest 80 --warmup 5 --dropout 0 \
    --attention-dropout 0 --attention $attention --out t
  check "CLS sees the text there with $attention" beyond_half
  check "--settings lra for $attention on lists" run train listops --data lists $small --settings lra \
    --longest 40 --steps 1 --attention $attention --out t
done
check "blocks of LRA's for images" run train image --data gray --settings lra --attention sinkhorn --steps 1 --batch 2 \
  --threads 2 --out t
check "features drawn at each step" run $learns --attention rfa --steps 20 --save-every 20 --out rfa
check "and when a training goes on" run $learns --attention rfa --steps 20 --save-every 14 --out rfa14
check "from a step between" run train text --data texts --resume rfa14.training --save-every 20
tail -c 8000 rfa.training >a
tail -c 8000 rfa14.training >b
check "are the same" same a b
rm -f rfa*
check "colours become gray" run show image --data colour --count 1
check "of red a third" grep -q '^::*$' out
check "the authors' settings" run train image --data gray --steps 1 --batch 2 --threads 2 --out t
own='^steps 1, batch 2, lr 0.005, warmup 4000, decay inverse-sqrt, weight-decay 0, layers 1, dim 64, heads 8, ffn 128, '
own=$own'hidden 128, longest 1024, positions learned, pooling cls, dropout 0.3, attention-dropout 0.1'
check "are Luna's" grep -q "$own" out
# images that are their own mirror images, rows of which differ, and ones that are not
bytes "$image int(k / 32) % 2 * 20 + (k % 32 == 5 || k % 32 == 26 ? i % 2 * 100 : 7) } }" >even
bytes "$image int(k / 32) % 2 * 20 + (k % 32 == 5 ? i % 2 * 100 : 7) } }" >uneven
for images in even uneven; do
  for mirror in no yes; do
    check "images, mirror $mirror" run train image --data $images --settings quick --steps 2 --batch 4 --validations 1 \
      --threads 1 --mirror $mirror --out mirror-$mirror
    cut -d , -f 1,2 mirror-$mirror.csv >mirror-$mirror
  done
  if [ $images = even ]; then check "a mirror does nothing to these" same mirror-no mirror-yes
  else check "but to others" differ mirror-no mirror-yes; fi
done
check "the mirror is among the settings" grep -q 'mirror yes' mirror-yes.txt
refuses "is for image alone" train text --data texts --mirror yes --out bad
rm -f mirror-*
check "lra show pathfinder draws" run show pathfinder --difficulty easy --count 2 --plot p.svg
check "two pictures with labels" [ "$(tags p.svg rect) $(tags p.svg text)" = "2048 2" ]
check "and prints them" [ "$(grep -c '^sample [01], label [01]:$' out) $(grep -c '^[ .:=+*#%@-]\{64\}$' out)" = "2 64" ]
check "and says what places tell" \
  grep -q "^The places of the discs alone tell the answer of \(59\|6[0-2]\)\.[0-9]% of 4000" out
cp out before
run show pathfinder --difficulty easy --count 2
check "the same ones again" same out before
run show pathfinder --difficulty easy --count 2 --data-seed 2
check "other ones for another seed" differ out before
check "lra show image" run show image --data gray --count 1
check "white is white" grep -q '^  *$' out

# ---- tables
cp whole.txt runs/a.txt
sed 's/^seed 1/seed 2/; s/^accuracy .*/accuracy 50.00/' whole.txt >runs/b.txt
sed 's/system .*/system Transformer/; s/^accuracy .*/accuracy 40.00/' whole.txt >runs/c.txt
sed 's/^accuracy .*/accuracy nan/' whole.txt >runs/d.txt
sed 's/^accuracy .*/accuracy 1e9/' whole.txt >runs/e.txt
sed 's/^system .*/system <script>|/; s/^from .*/from `x`/' whole.txt >runs/f.txt
head -c 3000 whole.safetensors >runs/g.txt
cp text runs/h.txt && cp empty runs/i.txt && mkdir runs/j.txt
check "lra table succeeds" run table runs --plot table.svg
check "a row for the seeds of a system" grep -q '^| Luna-4 | [0-9.]* | [0-9.]*, 50.00 | 1, 2 | 20 | 4 | ' out
check "the paper's number beside" grep -q '^| Transformer | 40.00 | 40.00 | 1 | 20 | 4 | .* | 37.11 |$' out
check "all of the paper's table" [ "$(grep -c '^| .* (' out)" -ge 15 ]
check "no mark-up from files" sh -c '! grep -q "<script" out table.svg'
check "what is no report is named" [ "$(grep -c 'is no report' err)" = 6 ]
check "the picture is whole" [ "$(tail -n 1 table.svg)" = "</svg>" ]
mkdir red
cp text "red/$escape[2J.txt"
for i in 1 2; do sed "s/^from .*/from $escape[2J/" whole.txt >"red/a$escape$i.txt"; done
run table red
check "what is no report, or one too many, is named" [ "$(grep -c '?' err)" = 2 ]
check "without what a terminal would obey" sh -c "cat out err >both"
check "as all that is said" shown both
report() { sed "$2" whole.txt >"$1.txt"; }
mkdir fields
report fields/a 's/^from .*/from [a](b)_c_*d*!~e~$f\\g/; s/^settings .*/settings _q_/'
check "a text of Markdown's own signs" run table fields
check "is shown as it is" grep -q -F 'Settings \_q\_: ' out
check "where samples are from too" grep -q -F ': \[a\]\(b\)\_c\_\*d\*\!\~e\~\$f\\g.' out
report fields/a 's/^seed 1/seed 9000000000000000/'
run table fields
check "a seed of 16 digits" grep -q '| 9000000000000000 |' out
long=$(awk 'BEGIN { while (i++ < 1000) printf "x" }')
report fields/b "s/^model .*/model ${long}y/; s/^seed 1/seed 2/"
report fields/c "s/^model .*/model ${long}z/; s/^seed 1/seed 3/"
report fields/d "s/^from .*/from ${long}y/; s/^seed 1/seed 4/"
report fields/e "s/^from .*/from ${long}z/; s/^seed 1/seed 5/"
report fields/f "s/^model .*/model $long$long/"
report fields/g "s/^system .*/system $long/"
report fields/h "s/^accuracy .*/accuracy $long/"
{ cat whole.txt; echo "later $long $long"; } >fields/i.txt
{ cat whole.txt; printf 'from a\000b\n'; } >fields/j.txt
run table fields
check "texts that differ at their ends" [ "$(grep -c "$long[yz]" out)" = 4 ]
check "those that do not fit" [ "$(grep -c '[fghj].txt is no report' err) $(grep -c 'is no report' err)" = "4 4" ]
mkdir strange
mkfifo strange/a.txt
{ cat whole.txt; awk 'BEGIN { while (i++ < 9000) print "later x" }'; } >strange/b.txt
"$build/$program" table strange >out 2>err &
pid=$! tries=0
while ! grep -q 'has no runs' err && [ $tries -lt 600 ]; do sleep 0.1 2>/dev/null || sleep 1; tries=$((tries + 1)); done
[ $tries -lt 600 ] || kill $pid
wait $pid
check "what is no file, or too large" [ "$(grep -c '[ab].txt is no report' err)" = 2 ]
mkdir heads
report heads/a 's/^accuracy .*/accuracy 70/'
report heads/b 's/^held .*/held 3/; s/^accuracy .*/accuracy 60/; s/^steps .*/steps 10/'
report heads/c 's/^seed .*/seed 2/; s/^steps .*/steps 10/; s/^accuracy .*/accuracy 50/'
report heads/d 's/^settings .*/settings authors/'
run table heads --plot table.svg
awk '/^Settings/ { head = $2 " " } /Measured on/ { sub(/.*Measured on/, ""); head = head $1 }
  /^. Luna-4/ && head { print head, $4, $10, $11 } /Beside/ { head = "" }' out >heads.txt
printf '%s\n' 'quick: 4 70.00 20 |' 'quick: 4 50.00 10 (not' 'quick: 3 60.00 10 (not' >heads_expected
check "each heading is true of its rows" sh -c 'grep quick heads.txt | cmp - heads_expected'
check "of other settings too" grep -q '^authors: 4 ' heads.txt
mkdir seeds
report seeds/a 's/^accuracy .*/accuracy 40.00/'
report seeds/b 's/^accuracy .*/accuracy 60.00/'
report seeds/c 's/^accuracy .*/accuracy 50.00/; s/^seed .*/seed 2/'
run table seeds
check "a seed counts once" grep -q '^| Luna-4 | 45.00 | 40.00, 50.00 | 1, 2 | 20 | 4 | [0-9.]* | 2, ' out
check "the second of it is named" grep -q '^lra: seeds/b.txt has the seed of another run$' err
report seeds/b 's/^threads .*/threads 5/; s/^seed .*/seed 3/'
run table seeds
check "no minutes of unlike machines" grep -q '^| Luna-4 | .* | 1, 3, 2 | 20 | 4 | | several |' out
report seeds/b 's/^instructions .*/instructions none/; s/^seed .*/seed 3/'
run table seeds
check "nor of unlike instructions" grep -q '^| Luna-4 | .* | 1, 3, 2 | 20 | 4 | | several |' out
cat >expected <<'END'
| system | ListOps | Text | Retrieval | Image | Pathfinder |
|---|---|---|---|---|---|
| Transformer | (37.11) | (65.21) | (79.14) | (42.94) | (71.83) |
| Transformer (LRA) | (36.37) | (64.27) | (57.46) | (42.44) | (71.40) |
| Local | (15.82) | (52.98) | (53.39) | (41.46) | (66.63) |
| Sparse | (17.07) | (63.58) | (59.59) | (44.24) | (71.71) |
| Longformer | (35.63) | (62.85) | (56.89) | (42.22) | (69.71) |
| Linformer | (35.70) | (53.94) | (52.27) | (38.56) | (76.34) |
| Reformer | (37.27) | (56.10) | (53.40) | (38.07) | (68.50) |
| Sinkhorn | (33.67) | (61.20) | (53.83) | (41.23) | (67.45) |
| Synthesizer | (36.99) | (61.68) | (54.67) | (41.61) | (69.45) |
| BigBird | (36.05) | (64.02) | (59.29) | (40.83) | (74.87) |
| Linear Transformer | (16.13) | (65.90) | (53.09) | (42.34) | (75.30) |
| Performer | (18.01) | (65.40) | (53.82) | (42.77) | (77.05) |
| Luna-16 | (37.43) | (65.74) | (79.38) | (46.39) | (78.36) |
| Luna-128 | (38.01) | (65.74) | (79.55) | (47.47) | (78.89) |
| Luna-256 | (37.98) | (65.78) | (79.56) | (47.86) | (78.55) |
END
mkdir papers
beside() { run table papers --plot table.svg && sed '1,/^## Beside/d' out | grep '^|' >beside.txt; }
rings() { grep -c "r='5'" table.svg; }
report papers/a 's/^system .*/system Local/; s/^of .*/of 21/; s/^accuracy .*/accuracy 90.00/'
easy='s/^task .*/task pathfinder/; s/^system .*/system Local/; s/^model /model difficulty easy, /'
report papers/b "$easy"
check "a run that is not done and easy pictures" beside
check "stand not beside the paper's numbers" same beside.txt expected
check "nor is the paper's number in the easy one's row" \
  sh -c "sed -n '/^## Pathfinder/,/^## Beside/p' out | grep -q '^| Local | .* |  *|\$'"
check "nor a ring" [ "$(rings)" = 1 ]
check "the difficulty is drawn" grep -q '>Local, easy, quick, 20 steps</text>' table.svg
check "and what is not done" grep -q '>Local, quick, 20 steps (not done)</text>' table.svg
report papers/c 's/^system .*/system Local/; s/^accuracy .*/accuracy 80.00/'
report papers/d "$easy; s/difficulty easy/difficulty hard/; s/^accuracy .*/accuracy 70.00/"
report papers/e "$easy; s/difficulty easy/difficulty intermediate/; s/^accuracy .*/accuracy 95.00/"
beside
check "finished and hard ones do" grep -q '^| Local | \*\*80.00\*\* (15.82) | .* | \*\*70.00\*\* (66.63) |$' beside.txt
check "with two rings more" [ "$(rings)" = 3 ]
refuses "has no runs" table folder
refuses "cannot open the folder nowhere: [A-Z]" table nowhere
refuses "cannot open the folder texts: [A-Z]" table texts

# ---- wrong use and bad files
printf '3\t[MAX 3 1 ]\nx\t[MIN 4 5 ]\n' >badlists
printf '1\tgood\n2\tbad\n' >badlabel
printf '1\tgood\tfilm\n' >threecells
printf '1\tgood\n' >pairs1
printf '\n\n' >lines
{ cat gray; printf 'x'; } >longer
{ head -c 10250 gray; printf '\012'; head -c 1024 gray; } >label10
printf '\t\n\t\n' >tabs
refuses "train, eval, quantize, draw, table or show"
refuses "no task pictures" train pictures
refuses "task file is missing" train
refuses "needs --data" train text --settings quick
refuses "generated, not read" train pathfinder --data lists
refuses "no flag --lr" table runs --lr 3
refuses "line 2 is not" train listops --data badlists --out bad
for list in '[MIN 10 12 ]' ']]]] 1 2' '[MAX 1 2' '1 2'; do
  { cat lists; printf '1\t%s\n' "$list"; } >badlist
  refuses "line 81 " train listops --data badlist --out bad
done
refuses "line 1 is not\|has something" train listops --data whole.safetensors --out bad
refuses "label of line 2" train text --data badlabel --out bad
refuses "line 1 is not" train text --data threecells --out bad
refuses "line 1 is not" train text --data text --out bad
refuses "line 1 is not" train retrieval --data pairs1 --out bad
refuses "the minimum is 10" train text --data lines --out bad
refuses "label of line 1" train text --data tabs --out bad
refuses "is not records" train image --data longer --out bad
refuses "is not records" train image --data label10 --out bad
refuses "is not records" train image --data one_byte --out bad
refuses "is not records" train image --data text --out bad
refuses "is empty" train image --data empty --out bad
refuses "cannot read folder" train image --data folder --out bad
refuses "cannot read missing" train text --data missing --out bad
refuses "cannot write" train listops --settings quick --out nowhere/run
refuses "[a-z]" eval text
refuses "[a-z]" eval p.svg
refuses "[a-z]" eval whole.csv
refuses "[0-9]" train text --data texts $small --dim 10 --heads 3 --out bad
refuses "one of these" train text --attention lunar
check "nothing else was written" [ "$(echo nowhere* *.probe)" = "nowhere* *.probe" ]

# ---- examples/runs.sh: a run stands still while something is timed, ends with the script, and is not made twice
command -v setsid >/dev/null 2>&1 || {
  echo "skipped: setsid, which runs.sh needs, is not here"
  finish
  exit
}
mkdir -p programs runs_data
printf '#!/bin/sh\necho "$@"; while [ ! -e stop ]; do echo >>ticks; sleep 0.1; done\n' >programs/lra
chmod +x programs/lra
: >runs_data/imdb.tsv
long_runs="env TMPDIR=$work BUILD=$work/programs sh $root/examples/runs.sh runs_data long"
grows() { # within a minute, as others may keep the lowest priority waiting
  tries=0 before=$(wc -l <ticks)
  until [ "$(wc -l <ticks)" -gt "$before" ] || [ $tries = 60 ]; do sleep 1; tries=$((tries + 1)); done
  [ $tries -lt 60 ]
}
stands() {
  tries=0 before=
  until [ "$(wc -l <ticks)" = "$before" ] || [ $tries = 60 ]; do
    before=$(wc -l <ticks) tries=$((tries + 1))
    sleep 3
  done
  [ $tries -lt 60 ]
}
: >ticks
$long_runs 'text-luna16-?' & pid=$!
check "a long run begins" grows
: >luna.timing.lock
check "it stands still while luna.timing.lock is there" stands
rm luna.timing.lock
check "and goes on after it" grows
kill "$pid"
wait "$pid" 2>/dev/null
check "it ends with the script" stands
: >stop
$long_runs 'text-luna16-1'
check "it is made once more, and says how it ended" [ "$(tail -n 1 long/text-luna16-1.log)" = "ended 0" ]
$long_runs 'text-luna16-1'
check "and then never again" [ "$(grep -c '^ended' long/text-luna16-1.log)" = 1 ]
: >long/pathfinder-number-luna16-1.training
echo whole >long/pathfinder-number-luna16-2.training
touch -t 202001010000 long/pathfinder-number-luna16-1.training
$long_runs 'pathfinder-number-luna16'
check "of several seeds the last one goes on" \
  grep -q -e '--seeds 1-4 .* --resume long/pathfinder-number-luna16-2.training$' long/pathfinder-number-luna16.log
check "nothing is left of a run that has ended" [ "$(echo long/*.running long/runs.*)" = "long/*.running long/runs.*" ]
finish
