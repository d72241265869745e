/* luna.h - attention over long sequences, in one header. Version 1.0. MIT or public domain: see LICENSE.

   Luna (Linear Unified Nested Attention, NeurIPS 2021) replaces softmax attention's quadratic cost by two nested
   attentions through a short memory P. Equation, section and table numbers in this file are those of version 2 of the
   paper, arXiv 2106.01540v2: attention (1), Transformer layer (2), pack (3), unpack (4), Luna attention (5), Luna
   layer (6), causal function (7).

   WHAT P IS
     P is a short sequence of l vectors, 16 by default, learned like a weight and rewritten by every encoder layer; a
     causal layer has a learned P of its own.
       X   [n,d]   x x x x x x x x x x x x   the sequence
                    \ \ \ | | | | / / /      pack:   Y_P = Attn(P, X), l queries read n tokens
       P   [l,d]          p p p p            the memory, then the packed context Y_P
                    / / / | | | | \ \ \      unpack: Y_X = Attn(X, Y_P), n queries read l slots
       Y_X [n,d]   y y y y y y y y y y y y   the result; after residual and norm Y_P is the next layer's P,
                                             and after a feed-forward too Y_X is its X
     Each takes n l dot products instead of n n: time and memory are linear in n. After the last layer P summarises the
     sequence in a fixed size: classifiers pool it, decoders read it, and it can be carried into the next segment. The
     causal form replaces the pack by running means, and so streams one token at a time in memory that does not grow.
     A classifier that pools P (the default) does not use its last layer's unpack and feed-forward: they are not
     computed and have no gradient, and a parameter without gradient is changed by no optimiser, nor by weight decay.

   HOW TO USE IT
     0. In one C or C++ file of its own:
            #define LUNA_IMPLEMENTATION
            #include "luna.h"
        Everywhere else include it alone. Link with -lm, and -lpthread where threads need it. The implementation takes
        8 to 20 s to compile at -O2. It holds kernels for SSE2, AVX2 and AVX-512 (or NEON, WASM SIMD128, else scalar
        ones) and picks the best at run time.
     1. Open a context: memory, threads, errors, randomness. Closing it frees all that was made from it.
            luna_ctx *ctx = luna_open(NULL);              null: the defaults, here and for every config below
     2. Make a model. Its parameters belong to a set, and are trained, saved and loaded by their names.
            luna_params *params = luna_params_open(ctx);
            luna_lm model;                                or luna_classifier, luna_masked_lm, luna_seq2seq,
            luna_lm_init(&model, params, NULL);           luna_encoder, or layers and ops of your own with luna_param
     3. Train it.
            luna_optimizer *adam = luna_adamw(params, NULL);
            for (...) {
              luna_input input = { tokens, NULL, batch, n, NULL };   null lengths: every sequence has n tokens
              luna_begin_step(ctx);                              releases every tensor of the step before
              luna_tensor *loss = luna_lm_loss(&model, &input, labels);
              luna_backward(loss);                               adds to the gradients; luna_item(loss) is its value
              if (luna_optimizer_step(adam) != LUNA_OK) break;   uses and zeroes them; any failure above arrives here
            }
        labels[i] is the token after tokens[i]; the caller shifts. A negative label is ignored: give -1 to padding and
        to the last place. Several rounds of begin, forward and luna_backward before one optimiser step accumulate.
        For sequences of numbers, set .features in the config, call luna_input_layer_fit on training data, and give
        input.features instead of tokens. For a forecast or a regression, use another loss, such as luna_mse.
     4. Save it, use it.
            if (luna_save(params, luna_path("model.safetensors")) != LUNA_OK) puts(luna_error(ctx));
            luna_begin_inference(ctx);                           no tape, no dropout; the same forward calls
            luna_close(ctx);
     5. Later: luna_load_model opens any saved model (own layers: init, then luna_load), luna_save_training and
        luna_load_training resume a run with the same bits, and luna_stream_open runs a language model one token at a
        time in constant memory.
     Headers in examples/: luna_ranks.h trains on several machines, luna_profile.h shows where the time goes,
     luna_beam.h searches by beams, and attentions/ has other attentions as hooks.
     examples/guide.md has a program for each task.

   MEMORY
     Parameters, gradients and optimisers stay until luna_close. Activations live in an arena that the next begin
     (luna_begin_step or luna_begin_inference) empties: a steady step allocates nothing. Without a begin, memory grows
     with each iteration. options.block gives a context one block for everything. A context with options.measure
     computes nothing: after one dry run of the same calls at the largest sizes, with the same threads, isa, other
     options and files, luna_memory(ctx).peak is the size of that block. Neither of them opens streams, which have
     their own memory, or runs luna_seq2seq_generate.
     Within a step, layers and models are scopes, whose ends release the values that nothing needs (luna_scope_begin).
     So an inference of many layers takes little more than one of two. To read a hidden value, or return one from an
     attention hook, call luna_keep; otherwise it may be gone. luna_backward releases the gradient of an op's result
     after its last use, unless luna_require_grad asked for it.
     Folded Luna layers (luna_form) keep 2 dim + ffn floats per token for backward, or 2 dim with the feed-forward
     recomputed: layer.recompute trades time for memory and changes no bit.

   ERRORS
     Nothing aborts or prints. A failed call leaves every object as it was; only a failed luna_backward zeroes the
     gradients. A failed op returns null, and ops given null return null. luna_error_status(ctx) is the status of the
     first failure since the last begin, luna_error(ctx) a sentence that names the call, the sizes and the remedy, and
     luna_error_id_of(ctx) its id in LUNA_ERRORS. A later failure of a call that is not an op (luna_load, an init)
     leaves its own sentence. One check per begin is enough: after a failure luna_backward and luna_optimizer_step
     change nothing and fail.
     A failed init leaves a zeroed struct, and the next begin fails with its sentence, once. A forward of a zeroed layer
     repeats it. A forward of a zeroed model returns null without a sentence, since no context is known;
     luna_optimizer_step then reports that there was no luna_backward. No call can detect an array of tokens, labels or
     lengths that is too short.

   PROMISES
     Results have the same bits for any number of threads. Numbers are float32, and long sums are in double. FMA is used
     only where written, never inferred. exp, log, erf, sine and cosine are luna.h's own. Causality is exact: a token,
     even Inf or NaN, changes no bit before it. Random numbers are Philox4x32-10, the same on every machine: initial
     values depend on seed and parameter name, dropout on seed, step and place. One thread at a time may use a context;
     several contexts may read a set that is not being trained (luna_params_share). A forked child has one thread.

   CHECKPOINTS
     Files are safetensors, which Python can open; tensors have the names of the authors' code. __metadata__ holds text:
       luna.kind                  causal_lm, classifier, masked_lm or seq2seq
       luna.vocab, luna.dim, ...  the model's config by its fields' names: decimal numbers, enums by value
       luna.dropout, luna.attention_dropout, luna.activation_dropout    in units of 10^-9
       luna.horizon               the longest sequence of training, or the config's; absent: none
       luna.fixed_horizon         present if the horizon is the config's, which training does not change
       luna.format                2 if the model has luna.forget, luna.output_gate or luna.rotary, unknown to luna.h
                                  0.1; 3 if luna.forget is 3
       luna.hook                  the name of the model's attention hook; luna.hook.<key>: its settings
       any other key              the caller's, by luna_params_set_text
     A later luna.h gives a model that this one cannot compute a larger luna.format or another luna.kind; loading it
     fails with a sentence. Other unknown keys that begin with "luna." change no output and are ignored. Only
     luna_load_matching, which compares just names and shapes, takes any file.
     luna_save_training adds tensors luna.momentI.NAME (Adam: I = 1 of the gradient, 2 of its square), luna.average.NAME
     for an optimiser with .average, luna.state if a luna_lm_state is carried, and, as 16 hexadecimal digits each,
       luna.optimizer             0 SGD, 1 Adam, 2 AdamW, 3 a hook
       luna.optimizer_name        the hook's name, as text; absent in older files, which means Apollo
       luna.attempts, luna.updates, luna.skipped, luna.skipped_in_row   steps tried, made, skipped as not finite
       luna.lr                    the learning rate before its schedule, as the float's bits
       luna.step, luna.seed       the context's, for dropout
       luna.products              bf16 if options.products was; else absent
       luna.unreached.NAME        present if no update had reached the parameter; luna.unreached in all newer files
     luna_save_int8 stores a product's matrix NAME [out,in] as I8, and its scales as NAME.scale, F32 [out].
     Sinusoidal positions are not stored. With w_i = 10000^(-i / (d/2 - 1)), position t has sin(t w_i) at i < d/2 and
     cos(t w_i) at d/2 + i, as in fairseq. X enters as s E[token] + sinusoid, s = sqrt(d) or 1
     (config.embedding_scale), and P as s P + sinusoid.

   THE PAPER IN THIS FILE
     A row leads from an equation through its layer, op and driver to the SIMD loop, then to the reference in plain
     loops and the test, a file in tests. A name is defined in the chapter beside it. LI_K(name) is compiled for each
     instruction set. Eq. 7 has two rows: chunks of rows, for training and prefill, and single rows.
     examples/lesson.c has all equations in plain loops.
   equation layer                              op                                      driver
            inner loop                         reference                               test
   1/3 pack li_nested_pack >>impl_layers       luna_pack >>impl_ops                    li_attention_tile >>attention
            LI_K(tile_softmax) >>attention     li_attention_row >>attention            attention.c
   4 unpack li_nested_unpack >>impl_layers     luna_unpack >>impl_ops                  li_unpack_panel >>unpack
            LI_K(group_softmax) >>unpack       li_unpack_reference >>unpack            attention.c
   6 layer  li_nested_half >>impl_layers       luna_layer_norm >>impl_ops              li_layer_norm_body >>impl_ops
            LI_K(layer_norm) >>elementwise     li_layer_norm_reference >>elementwise   elementwise.c
   7 chunks li_causal_attention >>impl_layers  luna_causal_nested_attention >>impl_ops li_causal_mix >>causal
            li_causal_bracket >>causal         li_causal_luna_reference >>causal       causal.c
   7 stream li_causal_attention >>impl_layers  luna_causal_nested_attention >>impl_ops li_luna_step >>causal
            LI_K(step_block) >>causal          li_mean_step >>causal                   causal.c
   forgets  li_forget_logits >>impl_layers     luna_causal_nested_attention >>impl_ops li_forget_out >>causal
            LI_K(forget_weights) >>causal      li_forget_reference >>causal            forgetting.c
   Adam     luna_optimizer_step >>impl_trainer li_cpu_update >>impl_backend            li_update_task >>impl_backend
            LI_K(adam) >>elementwise           li_adam_reference >>elementwise         trainer.c

   SWITCHES, defined before the implementation (and, for those marked *, before every include)
     LUNA_STATIC *          all functions static
     LUNA_NO_TRAIN *        no backward pass, no optimisers
     LUNA_NO_STDIO *        no luna_path; luna_bytes, luna_buffer and luna_callbacks remain
     LUNA_NO_THREADS        no thread pool; a caller's parallel_for still works
     LUNA_NO_SIMD           scalar kernels only
     LUNA_NO_INT8 *         no products in 8 bits and no luna_save_int8; I8 files load as float
     LUNA_NO_BF16           no products in 16 bits
     LUNA_NO_AMX            no products by tiles
     LUNA_MALLOC, LUNA_FREE the default allocator; define both or neither
     LUNA_API *             prefix of public functions
     LUNA_BACKEND           for a file without the implementation: declares what a backend needs (>>backend)
     LUNA_HEADER_FILENAME   the name by which luna.h includes itself, if it was renamed

   CONTENTS (search for the tag)
     1. Public API        >>status >>context >>tensors >>ops >>params >>layers >>models >>trainer >>checkpoints
                          >>stream >>functions >>trace
     2. Implementation    >>backend >>base >>kernels >>vector >>int8 >>gemm >>elementwise >>attention >>unpack
                          >>causal >>table >>dispatch >>impl_status >>impl_functions >>safetensors >>threads
                          >>impl_context >>impl_backend >>impl_trace >>impl_tensors >>impl_params >>past
                          >>impl_ops >>metadata >>impl_layers >>impl_models >>impl_trainer >>impl_checkpoints
                          >>impl_stream >>sampling >>decoder
   The tag impl_NAME opens the implementation of the public chapter NAME. */

#ifndef LUNA_H
#define LUNA_H

/* ========================================
   1. Public API
   ======================================== */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a version promises: a program that uses these declarations compiles with each later version of the same major
   number. Enums keep their values, and zeros their meaning. Later versions open this one's checkpoints and resume its
   training. Within a minor number, results keep their bits on one instruction set. Structs may grow at their end, so
   header and library must have the same version (luna_version). Not promised: >>backend, what luna_cuda.cuh has beyond
   its declarations, names that start with li_, the numbers of errors and ops, stream states in a file, speed.
   tests/tools/api.txt lists all declarations. */
#define LUNA_VERSION "1.0.0"
#define LUNA_VERSION_NUMBER 10000    /* 10000 major + 100 minor + patch */

#if defined(__GNUC__) || defined(__clang__)
#define LI_FN static __attribute__((unused))
#else
#define LI_FN static
#endif
#ifndef LUNA_API
#if defined(LUNA_STATIC)
#define LUNA_API LI_FN
#elif defined(__cplusplus)
#define LUNA_API extern "C"
#else
#define LUNA_API extern
#endif
#endif


/* ----------------
   >>status
   ---------------- */
typedef enum luna_status {
  LUNA_OK = 0,
  LUNA_BAD_ARGUMENT,  /* invalid argument */
  LUNA_OUT_OF_MEMORY, /* The allocator or the block has no memory left. */
  LUNA_BAD_FILE,      /* The bytes are not a valid file of this kind. */
  LUNA_CANNOT_READ,   /* The file is missing or unreadable. */
  LUNA_CANNOT_WRITE,  /* The file could not be written; an older one is untouched. */
  LUNA_MISMATCH,      /* Names or shapes in a file and a parameter set differ. */
  LUNA_UNSUPPORTED,   /* This build, machine or backend does not support it. */
  LUNA_DEVICE_FAILED, /* A device call, queued device work, or a call between ranks failed. */
  LUNA_NOT_FINITE     /* Too many optimiser steps in a row had a NaN or Inf in the loss or a gradient. */
} luna_status;
/* Returns a status in a few words; the text stays valid. */
LUNA_API const char *luna_status_text(luna_status status);
/* Returns LUNA_VERSION_NUMBER of the implementation that the program is linked with. */
LUNA_API int luna_version(void);

/* X(ID, STATUS, SENTENCE): each LUNA_ERROR_ID has a LUNA_STATUS and the sentence of luna_error. Streams' errors come
   first. In a sentence %s is text (the first is the function's name), %d and %f are numbers, and %t is a tensor's
   shape. A stream's sentences are fixed. The numbers of ids may change with the version. */
#define LUNA_ERRORS(X) \
  X(NO_STREAM, BAD_ARGUMENT, "the stream is null: opening it failed") \
  X(STREAM_NO_TOKENS, BAD_ARGUMENT, "luna_stream_step, luna_stream_step_features or luna_stream_prefill: this model " \
    "reads tokens, and there are none: call luna_stream_step, or give luna_stream_prefill input.tokens") \
  X(STREAM_NO_FEATURES, BAD_ARGUMENT, "luna_stream_step, luna_stream_step_features or luna_stream_prefill: this " \
    "model reads features in place of tokens, and there are none: call luna_stream_step_features, or give " \
    "luna_stream_prefill input.features") \
  X(STREAM_NO_STEPS, BAD_ARGUMENT, "luna_stream_prefill: n is below 1: there is nothing to read") \
  X(STREAM_FEATURE, BAD_ARGUMENT, "luna_stream_step_features or luna_stream_prefill: a feature is Inf, or more than " \
    "1e9 deviations from its mean. Sequences whose logits are NaN have not read it, and their state is as before; " \
    "without logits none has. Clamp it, or give NaN where a number is missing") \
  X(STREAM_NOT_FINITE, NOT_FINITE, "luna_stream: an output is not finite: weights are too large, or not finite. A " \
    "layer whose inputs were not finite has kept its state as before") \
  X(STREAM_TOO_MANY_TOKENS, BAD_ARGUMENT, "luna_stream_prefill: n is too large") \
  X(STREAM_TOKEN, BAD_ARGUMENT, "luna_stream_step or luna_stream_prefill: a token is not in 0..vocab - 1; none was " \
    "read") \
  X(STREAM_POSITIONS, BAD_ARGUMENT, "luna_stream_step or luna_stream_prefill: past the learned positions, max_length") \
  X(STREAM_INPUT, BAD_ARGUMENT, "luna_stream_prefill: the batch is not the stream's, or lengths are not null") \
  X(STREAM_ORDER, BAD_ARGUMENT, "luna_stream_reorder: from is null or has an index outside 0..batch - 1") \
  X(STREAM_STATE_SIZE, BAD_ARGUMENT, "luna_stream_state_load: bytes is null or size is not luna_stream_state_size") \
  X(STREAM_STATE, BAD_ARGUMENT, "luna_stream_state_load: the state is of another model size or batch, or damaged") \
  X(STATE_MODEL, UNSUPPORTED, "%s: a state can be carried of a model with Luna attention, on the CPU, not with " \
    "LUNA_ISA_REFERENCE, nor with attention dropout unless its memory forgets") \
  X(STATE_INPUT, BAD_ARGUMENT, "%s: the state is of %d sequences, all of whose rows are real; the input has %d, and " \
    "%s") \
  X(STATE_TWICE, BAD_ARGUMENT, "%s: this step continues a state already; begin the next one before") \
  X(STATE_OTHER, BAD_ARGUMENT, "%s: the state is of another model, batch or layer count, or damaged") \
  X(STATE_MISSING, MISMATCH, "%s: the training in %s carried no state of this model and batch") \
  X(STATE_POSITIONS, BAD_ARGUMENT, "%s: the sequences stand at different positions, which %s cannot tell apart") \
  X(NO_CONTEXT, BAD_ARGUMENT, "there is no context: luna_open failed; options.error and options.log say why") \
  /* A backend or the user's functions fail with this; they give the status, and the sentence by luna_fail. */ \
  X(BACKEND, DEVICE_FAILED, "%s: the backend, or a function of your own, failed: %s (luna_fail gives a reason)") \
  X(NO_OP, UNSUPPORTED, "%s: this backend has no op %s") \
  X(RELEASED, BAD_ARGUMENT, "%s: the values of tensor %t were released: its scope ended (call luna_keep before) or a " \
    "new step began (make it again after luna_begin_step or luna_begin_inference)") \
  X(OTHER_CONTEXT, BAD_ARGUMENT, "%s: input %d belongs to another context (luna_params_share lets two read one set)") \
  X(NO_MEMORY, OUT_OF_MEMORY, "%s: no memory for %d more bytes (%d in use)") \
  X(STREAM_BLOCK, OUT_OF_MEMORY, "%s: a context in one block has no memory for a stream of %d bytes; use " \
    "luna_stream_open_bytes") \
  /* arguments of any call */ \
  X(NULL_ARGUMENT, BAD_ARGUMENT, "%s: %s is null") \
  X(VALUE_RANGE, BAD_ARGUMENT, "%s: %s is %d, outside %d..%d") \
  X(ELEMENT_RANGE, BAD_ARGUMENT, "%s: %s[%d] is %d, outside %d..%d") \
  X(FEATURE, BAD_ARGUMENT, "%s: %s[%d] is %f; it must be finite, or NaN where a number is missing") \
  X(FEATURE_SCALE, BAD_ARGUMENT, "%s: feature %d deviates from its mean by more than 8e37, too much to be scaled: " \
    "clamp it, or give it in another unit") \
  X(FEATURE_LARGE, BAD_ARGUMENT, "%s: features[%d] is %f, more than 1e9 deviations (1 / input_norm.scale) from its " \
    "mean: clamp it, or give NaN where a number is missing") \
  X(NO_FEATURES, BAD_ARGUMENT, "%s: the layer's model reads tokens: it has no features (its config's are 0)") \
  X(FIT_NOTHING, BAD_ARGUMENT, "%s: there is no finite number in %d rows of %d: nothing is fitted. Was the data " \
    "read?") \
  X(OUTPUTS_NOT_FITTED, BAD_ARGUMENT, "%s: the outputs' means and deviations were never set: call " \
    "luna_lm_fit_outputs on training targets before the first step, or init without .output_norm") \
  X(PROBABILITY, BAD_ARGUMENT, "%s: %s is %f, outside [0, 1)") \
  X(NOT_FINITE_ARGUMENT, BAD_ARGUMENT, "%s: %s is %f; it must be finite") \
  X(NEGATIVE, BAD_ARGUMENT, "%s: %s is %f; it must be finite and not negative") \
  X(SHAPE, BAD_ARGUMENT, "%s: %s %t of rank %d is invalid: at most 4 axes, none negative, and %d elements in all") \
  X(TOO_LARGE, BAD_ARGUMENT, "%s: %d times %d elements are more than %d") \
  X(NOT_UTF8, BAD_ARGUMENT, "%s: %s is not UTF-8") \
  /* tensors */ \
  X(REFERENCE_STEP, UNSUPPORTED, "luna_begin_step: LUNA_ISA_REFERENCE has no backward pass. Call " \
    "luna_begin_inference, or train in a context with another options.isa") \
  X(NO_GRAD, BAD_ARGUMENT, "luna_read_grad: tensor %t has no gradient: call luna_backward first, and " \
    "luna_require_grad for the result of an op") \
  X(WRITE_BORROWED, BAD_ARGUMENT, "luna_write: tensor %t reads values of another set in place") \
  X(NOT_ONE_ELEMENT, BAD_ARGUMENT, "%s: tensor %t has %d elements; reduce it to one") \
  X(NO_TAPE, BAD_ARGUMENT, "luna_backward: nothing to differentiate: no parameter took part in the loss, or it was " \
    "not made after luna_begin_step") \
  X(SECOND_BACKWARD, BAD_ARGUMENT, "luna_backward: called twice since luna_begin_step; call that in the loop, before " \
    "each forward (several rounds of both before one luna_optimizer_step add up), or add the losses by luna_add") \
  X(BACKWARD_MEMORY, OUT_OF_MEMORY, "luna_backward: no memory for %d more bytes (%d in use). All gradients are zero " \
    "again, those of earlier rounds too: begin, and accumulate from the first round") \
  X(TOO_MANY_TENSORS, BAD_ARGUMENT, "%s: %d tensors are given, at most %d are possible") \
  /* ops */ \
  X(SHAPES, BAD_ARGUMENT, "%s: %s %t does not fit \"%s\": %s") \
  /* Equal letters mean equal sizes; capitals mean at least 1. */ \
  X(AXIS, BAD_ARGUMENT, "%s: tensor %t has no axis %d") \
  X(RESHAPE, BAD_ARGUMENT, "luna_reshape: %t has %d elements, which do not make %t") \
  X(SLICE_RANGE, BAD_ARGUMENT, "luna_slice: start %d + count %d exceeds axis %d of %t") \
  X(PERMUTE_AXES, BAD_ARGUMENT, "luna_permute: axis %d of %t occurs twice or does not exist") \
  X(CONCAT_SHAPES, BAD_ARGUMENT, "%s: %t and %t differ in an axis other than %d") \
  X(NEW_AXIS, BAD_ARGUMENT, "%s: tensor %t has 4 axes already, which is the maximum") \
  X(BROADCAST, BAD_ARGUMENT, "%s: %t and %t do not broadcast: from the last axis on, sizes must be equal, or one of " \
    "them 1") \
  X(CLAMP, BAD_ARGUMENT, "luna_clamp: low %f and high %f: low must not be larger, and neither NaN") \
  X(MATMUL_AXES, BAD_ARGUMENT, "luna_matmul: %t and %t: the second's leading axes must be the last leading axes of " \
    "the first") \
  X(MATMUL_INNER, BAD_ARGUMENT, "luna_matmul: %t and %t: the first has %d columns, the second %d rows") \
  X(LABEL_RANGE, BAD_ARGUMENT, "%s: labels[%d] is %d; there are %d classes (a negative label is ignored)") \
  X(SMOOTHING, BAD_ARGUMENT, "%s: smoothing is %f, outside 0..1") \
  X(ROTARY_ODD, BAD_ARGUMENT, "%s: a head has %d numbers, which rotary positions turn in pairs: its size must be " \
    "even") \
  X(ROTARY_BASE, BAD_ARGUMENT, "luna_rotary: base is %f; it is positive, or 0 for 10000") \
  X(EPSILON, BAD_ARGUMENT, "%s: epsilon is %f; it is positive, or 0 for 1e-5") \
  X(LOG_SUM_EXP, BAD_ARGUMENT, "%s: log_sum_exp cannot be had beside %s") \
  X(RAGGED_LENGTHS, BAD_ARGUMENT, "luna_softmax_attention: lengths must be null when sequences is %d: query_offsets " \
    "and key_offsets say where sequences end") \
  X(OFFSETS, BAD_ARGUMENT, "%s: %s[%d] is %d; offsets start at 0, never fall, and end at the %d rows") \
  X(OMEGA, BAD_ARGUMENT, "%s: omega is %d; it must be LUNA_ACTIVATION_SOFTPLUS2, LUNA_ACTIVATION_SOFTPLUS or " \
    "LUNA_ACTIVATION_ELU1, which are never negative") \
  /* parameters */ \
  X(NAME_LENGTH, BAD_ARGUMENT, "%s: a name has %d bytes, more than %d: '%s%s'") \
  X(NAME_RESERVED, BAD_ARGUMENT, "%s: '%s': __metadata__ and names that start with luna. belong to luna.h") \
  X(PARAM_EXISTS, BAD_ARGUMENT, "luna_param: the set has a parameter '%s' already; a set holds one model: use " \
    "another set, or prefix") \
  X(SET_BORROWED, BAD_ARGUMENT, "%s: the set borrows its parameters, which are read-only; load a copy into another") \
  X(BORROW_DEVICE, MISMATCH, "%s: %s %t belongs to a context on another device") \
  X(BORROW_MISSING, MISMATCH, "%s: there is no %s %t to borrow from") \
  X(BORROW_SHAPE, MISMATCH, "%s: %s %t has another shape where it is borrowed from") \
  /* layers and models */ \
  X(NOT_INITIALIZED, BAD_ARGUMENT, "%s: the layer or model is null or zeroed: its init failed or was not called" \
    "%s%s") \
  X(HEADS, BAD_ARGUMENT, "%s: dim %d is not a multiple of %s %d") \
  X(FIELD_UNUSED, BAD_ARGUMENT, "%s: %s is %d; it must be 0 %s") \
  X(LUNA_ONLY, UNSUPPORTED, "%s: %s has Luna attention only, whose memory the layers pass on: attention and " \
    "own_memory must be false, hook null") \
  X(HOOK_CPU_ONLY, UNSUPPORTED, "%s: the optimiser %s runs on the CPU only, and this context is on a device") \
  X(HOOK_SETTINGS, BAD_ARGUMENT, "%s: the settings of the attention hook '%s' cannot be %s") \
  X(HOOK_UNKNOWN, UNSUPPORTED, "%s: the model in %s has the attention hook '%s', which options.hooks does not have") \
  X(HOOK_INIT, BAD_ARGUMENT, "%s: the attention hook's init returned null for '%s'") \
  X(HOOK_NULL, BAD_ARGUMENT, "%s: the attention hook's forward returned null") \
  X(HOOK_SHAPE, BAD_ARGUMENT, "%s: the attention hook's forward returned %t; it must be %t, as its x") \
  X(ROUTED, BAD_ARGUMENT, "%s: a routed memory needs a forget [%d] of one number for each head") \
  X(ROUTE_SLOTS, BAD_ARGUMENT, "%s: %d router values for %d heads; each head needs the same number, and at least 2") \
  X(FORGET_SLOTS, BAD_ARGUMENT, "luna_causal_attention_layer_forward: p has %d slots; the layer's forget gates are " \
    "for config.memory = %d") \
  X(SEQUENCE_SHAPE, BAD_ARGUMENT, "%s: %s %t must be [%d, n, %d]") \
  X(MEMORY_SHAPE, BAD_ARGUMENT, "%s: p %t must be [l, %d] or [%d, l, %d]") \
  X(MAX_LENGTH, BAD_ARGUMENT, "%s: a sequence of %d exceeds the config's max_length %d") \
  X(BATCHES_DIFFER, BAD_ARGUMENT, "%s: the batches %d and %d differ") \
  X(POOLING_MEMORY, BAD_ARGUMENT, "luna_classifier_init: pooling the memory needs Luna attention, which has one") \
  X(POOL_EMPTY, BAD_ARGUMENT, "luna_classifier_pool: %t has no first row") \
  X(CLASSIFIER_PAIR, BAD_ARGUMENT, "luna_classifier_forward: this model compares two sequences; call " \
    "luna_classifier_forward_pair") \
  X(CLASSIFIER_SINGLE, BAD_ARGUMENT, "luna_classifier_forward_pair: this model reads one sequence; call " \
    "luna_classifier_forward") \
  X(SHARED_VOCAB, BAD_ARGUMENT, "%s: share_embeddings needs vocab %d and target_vocab %d to be equal") \
  X(LOGITS_NOT_FINITE, BAD_ARGUMENT, "luna_seq2seq_generate: the model's logits for source %d are not finite") \
  X(STREAM_CONFIG, BAD_ARGUMENT, "%s: %s") \
  X(STREAM_ATTENTION, UNSUPPORTED, "luna_stream_open: only Luna attention streams in constant memory; with another " \
    "attention or a hook call luna_lm_forward on the whole sequence") \
  /* training */ \
  X(SCHEDULE_TOTAL, BAD_ARGUMENT, "%s: schedule.total is %d; a linear or cosine decay ends there: set it to the " \
    "number of steps") \
  X(NESTEROV, BAD_ARGUMENT, "%s: nesterov needs a momentum above 0") \
  X(GROUP_EMPTY, MISMATCH, "luna_optimizer_add_group: no parameter fits name '%s' (empty = any) and max_rank %d (0 = " \
    "any)") \
  X(FREEZE_EMPTY, MISMATCH, "luna_params_freeze: no parameter's name has '%s' in it") \
  X(FREEZE_TAPE, BAD_ARGUMENT, "luna_params_freeze: the step has computed something that luna_backward has not gone " \
    "back over; call it after that, or right after a begin") \
  X(NO_BACKWARD, BAD_ARGUMENT, "luna_optimizer_step: no luna_backward since the last step. Call it before each step; " \
    "a null loss means that an earlier call failed or that the model was never initialised") \
  X(SKIPPED_STEPS, NOT_FINITE, "luna_optimizer_step: %d steps in a row skipped, up to step %d: the loss or a " \
    "gradient was not finite or too large. The parameters are as before. Lower lr, set clip, or look for NaN and Inf " \
    "in the data") \
  X(AVERAGE_NONE, BAD_ARGUMENT, "luna_optimizer_swap_average: the optimiser's config has no .average") \
  X(AVERAGE_SWAPPED, BAD_ARGUMENT, "%s: parameters and averages have changed places; call " \
    "luna_optimizer_swap_average again before") \
  X(GRAD_OF, BAD_ARGUMENT, "luna_write_grad: tensor %t is no parameter that learns") \
  X(RATES, BAD_ARGUMENT, "luna_optimizer_step: the learning rate %f or weight decay %f of parameter '%s', with " \
    "schedule and group, is too large: at most 1e9 and 1e6 are possible, and 2 as their product") \
  /* files */ \
  X(CANNOT_OPEN, CANNOT_READ, "%s: '%s' cannot be opened; does it exist, and may it be read?") \
  X(READ_IRREGULAR, CANNOT_READ, "%s: '%s' is not a regular file") \
  X(READ_FAILED, CANNOT_READ, "%s: %s could not be read in full (%d bytes)") \
  X(WRITE_FAILED, CANNOT_WRITE, "%s: %s could not be written in full") \
  X(SAVE_BUFFER, CANNOT_WRITE, "%s: the buffer has %d bytes; %d are needed") \
  X(SAVE_PATH, CANNOT_WRITE, "%s: the path '%s', or what it links to, is longer than %d bytes") \
  X(SAVE_LINK, CANNOT_WRITE, "%s: '%s' is a link that leads nowhere") \
  X(SAVE_IRREGULAR, CANNOT_WRITE, "%s: '%s' is not a regular file and is left as it is") \
  X(SAVE_LOOKUP, CANNOT_WRITE, "%s: the folder of '%s' cannot be searched") \
  X(SAVE_TEMPORARY, CANNOT_WRITE, "%s: no temporary file can be made beside '%s'; does the folder exist, and may it " \
    "be written to?") \
  X(SAVE_REPLACE, CANNOT_WRITE, "%s: '%s' cannot be replaced") \
  X(NOT_SAFETENSORS, BAD_FILE, "%s: %s is not a valid safetensors file: %s") \
  X(NOT_A_MODEL, BAD_FILE, "%s: %s does not hold such a model: %s") \
  X(FILE_KIND, BAD_FILE, "%s: the model in %s is a %s, not a %s; luna_load_model opens any") \
  X(FILE_FIELD, BAD_FILE, "%s: %s is missing from the metadata of %s, or out of range") \
  X(FILE_COUNTERS, BAD_FILE, "%s: the counters in %s are out of range: %d attempts, %d updates, %d skipped, of these " \
    "%d in a row") \
  X(FILE_CONFIG, MISMATCH, "%s: %s is %s in %s and %s in the set's model; init that with the file's config, or let " \
    "luna_load_model take it from the file") \
  X(FILE_TENSOR_MISSING, MISMATCH, "%s: %s has no tensor '%s' of shape %t in F32, F16, BF16 or F64, nor in I8 beside " \
    "its scales, NAME.scale of F32") \
  X(FILE_TENSOR_EXTRA, MISMATCH, "%s: tensor '%s' of %s is not a parameter of this set: init the model first, or " \
    "luna_load_model") \
  X(FILE_TENSOR_SHAPE, MISMATCH, "%s: parameter '%s' is %t and has another shape in %s") \
  X(FILE_TENSOR_COUNT, MISMATCH, "%s: %s has %d tensors, the model %d") \
  X(NOTHING_MATCHES, MISMATCH, "%s: none of the %d parameters is in %s in its shape") \
  X(SET_NOT_EMPTY, BAD_ARGUMENT, "%s: the set has %d parameters already; load into a new one") \
  X(NOT_TRAINING, BAD_FILE, "%s: %s has no luna.optimizer: it was written by luna_save. Load it by luna_load, or " \
    "luna_load_model, and train on with new moments") \
  X(OPTIMIZER_KIND, MISMATCH, "%s: the training in %s is of %s, the optimiser %s") \
  X(MOMENT_COUNT, MISMATCH, "%s: %s has %d moments and averages, the optimiser %d: %s") \
  X(MOMENT, MISMATCH, "%s: moment %d of '%s' is missing from %s, of another shape, or not F32")
typedef enum luna_error_id {
  LUNA_ERROR_NONE = 0,
#define LI_ERROR(id, status, sentence) LUNA_ERROR_##id,
  LUNA_ERRORS(LI_ERROR)
#undef LI_ERROR
  LUNA_ERROR_COUNT
} luna_error_id;

/* Instruction sets. luna.h picks the best at run time; options and arguments can force one (for tests). SCALAR exists
   only where no other does. REFERENCE runs plain loops from the equations, slowly, on the caller's thread, with the
   same bits on every machine; a context opened with it runs whole models but cannot train. The last four are AVX2 or
   AVX-512 with other products in 8 bits (VNNI) and bfloat16 (BF16: vdpbf16ps; AMX: tiles). */
typedef enum luna_isa {
  LUNA_ISA_BEST = 0, LUNA_ISA_SCALAR, LUNA_ISA_SSE2, LUNA_ISA_AVX2, LUNA_ISA_AVX512, LUNA_ISA_NEON, LUNA_ISA_WASM,
  LUNA_ISA_REFERENCE, LUNA_ISA_AVX2_VNNI, LUNA_ISA_AVX512_VNNI, LUNA_ISA_AVX512_BF16, LUNA_ISA_AMX
} luna_isa;
/* These return the best set of this build and machine, whether a set is available, and a set's name, which stays valid.
   Linux must permit a process to use AMX; only luna_isa_available(LUNA_ISA_AMX), and opening what multiplies by tiles,
   request it. */
LUNA_API luna_isa luna_isa_best(void);
LUNA_API bool luna_isa_available(luna_isa isa);
LUNA_API const char *luna_isa_name(luna_isa isa);

/* Functions of single numbers. The first are a layer's activations; those after LUNA_ACTIVATION_NONE are for
   luna_activate alone. ELU1 is elu(x) + 1 [arXiv 2006.16236], GELU the exact (erf) form, SOFTPLUS ln(1 + e^x),
   SOFTPLUS2 log2(1 + 2^x), SILU x sigmoid(x), LEAKY_RELU 0.01 x below 0, RSQRT 1 / sqrt(x). NaN stays NaN. */
typedef enum luna_activation {
  LUNA_ACTIVATION_DEFAULT = 0, /* none; ReLU in a feed-forward, softplus2 in an omega */
  LUNA_ACTIVATION_RELU, LUNA_ACTIVATION_GELU, LUNA_ACTIVATION_ELU1, LUNA_ACTIVATION_SOFTPLUS, LUNA_ACTIVATION_SOFTPLUS2,
  LUNA_ACTIVATION_SIGMOID, LUNA_ACTIVATION_SILU, LUNA_ACTIVATION_TANH, LUNA_ACTIVATION_LEAKY_RELU,
  LUNA_ACTIVATION_NONE, /* x itself */
  LUNA_ACTIVATION_EXP, LUNA_ACTIVATION_LOG, LUNA_ACTIVATION_SQRT, LUNA_ACTIVATION_RSQRT, LUNA_ACTIVATION_ABS,
  LUNA_ACTIVATION_COUNT
} luna_activation;

/* Tensors are F32. I8, 8 bits with a scale per row, is for weights in inference (options.weights,
   luna_stream_config.weights). BF16 is for the operands of products (options.products). */
typedef enum luna_dtype { LUNA_DTYPE_F32 = 0, LUNA_DTYPE_I8, LUNA_DTYPE_BF16 } luna_dtype;

/* Positions in a model's embedding. The default is sinusoidal; luna_lm's is none. */
typedef enum luna_positions {
  LUNA_POSITIONS_DEFAULT = 0, LUNA_POSITIONS_NONE, LUNA_POSITIONS_SINUSOIDAL, LUNA_POSITIONS_LEARNED
} luna_positions;

/* The input of every model: sequences of tokens or, if the model's config has features, of features. The arrays are
   copied into the step. */
typedef struct luna_input {
  /* [batch,n], each in 0..vocab - 1, also in the padding, where the value changes nothing. */
  const int32_t *tokens;
  const int32_t *lengths; /* [batch] real steps, 0..n; null = n */
  int64_t batch, n;
  /* [batch,n,features]. NaN is a missing number. Inf, or a number more than 1e9 deviations (luna_input_layer_fit's)
     from its mean, is an error, since it would spoil all later steps of a causal model. Padding may hold anything. */
  const float *features;
} luna_input;

/* Runs task(work, i) for each i in [0, count), in any order, on any threads, and returns when all are done. */
typedef void (*luna_parallel_for)(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work);
/* ----------------
   >>context: memory, threads, errors, the step protocol
   ---------------- */
typedef struct luna_ctx luna_ctx;
typedef struct luna_tensor luna_tensor;
typedef struct luna_backend luna_backend;

/* How a call without a context runs (>>functions). luna_custom_run returns one. */
typedef struct luna_run {
  luna_isa isa;                   /* 0: best */
  void *scratch;                  /* any alignment */
  size_t scratch_size;
  luna_parallel_for parallel_for; /* null: the caller's thread */
  void *parallel_user;
  int threads;                    /* At most this many tasks run; 0 = 1. */
} luna_run;

typedef struct luna_allocator { /* Set both functions or neither. allocate may return null and need not align. */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *pointer, size_t bytes);
  void *user;
} luna_allocator;

/* How Luna attention is computed. Folded: the projections of the long sequence move into the short memory, which gives
   the same function up to rounding in less time and memory. Unfolded: as written in the paper. */
typedef enum luna_form { LUNA_FORM_CHEAPEST = 0, LUNA_FORM_UNFOLDED, LUNA_FORM_FOLDED } luna_form;

typedef struct luna_attention_hook luna_attention_hook;
typedef struct luna_options {
  int threads;              /* 0 = one per core; no more than cores run at once */
  luna_parallel_for parallel_for; /* The caller's threads replace a pool; set `threads` too. */
  void *parallel_user;
  luna_isa isa;             /* 0 = best; LUNA_ISA_REFERENCE: inference only */
  uint64_t seed;            /* seeds initial parameters and dropout */
  luna_allocator allocator; /* zero = LUNA_MALLOC, LUNA_FREE */
  void *block;              /* All memory is taken from it; no allocator is called. */
  size_t block_size;
  bool measure;             /* Computes nothing; luna_memory().peak is the block_size that the same calls need. */
  /* Receives each failure when it happens and, with LUNA_OK, messages that are not failures: skipped steps, a loss in
     which nothing counts, features that were never fitted, a run resumed with other products. */
  void (*log)(void *user, luna_status status, const char *sentence);
  void *log_user;
  luna_form form;           /* 0 = by cost */
  /* 0 = this CPU; luna_cuda.cuh has one for NVIDIA GPUs. The host then reads and writes values only by luna_read,
     luna_item and luna_write. Checkpoints and saved streams move between devices. */
  const luna_backend *backend;
  const char **error;       /* luna_open puts the reason here when it returns null; 0 = nowhere */
  /* LUNA_DTYPE_I8: in inference, products by parameters of 16 columns or more (luna_linear, luna_feed_forward and what
     is made of them) run in 8 bits, exactly, on rounded weights and rounded rows of x, each row with its scale. The
     error is about 1%. It is faster where weights are read from memory for few rows, or with AVX-512 VNNI or AMX.
     Norms, attention itself, biases and convolutions stay float. Parameters stay too, and get a copy of a quarter of
     their bytes when first read; training does not change. CPU only. 0 = F32 */
  luna_dtype weights;
  /* LUNA_DTYPE_BF16: products by parameters (luna_linear, luna_feed_forward, luna_linear_cross_entropy, folded
     attention and what is made of them), pack and softmax attention round their operands to bfloat16 and sum in float,
     forward and backward. It is faster with AMX, or on AMD with AVX-512 BF16; elsewhere it computes the same function
     without gain (luna_isa_of tells which one runs). Everything else stays float32, streams too. CPU only. 0 = F32.
     Linux must permit a process to use AMX. luna_open requests this if products or weights need it, for all threads and
     permanently; from then on sigaltstack refuses stacks that are too small for a tile's 8 KB. If it is refused,
     products run as on other processors. A product leaves no tile configuration: a caller that uses AMX itself must
     configure its tiles again after each call. */
  luna_dtype products;
  /* The attention hooks that luna_load_model finds by name: an array that ends with null and lives as long as the
     context. Null: none. */
  const luna_attention_hook *const *hooks;
} luna_options;

/* Null options mean all defaults. Returns null, and tells options.error and options.log why, when out of memory, the
   block is too small or an option is invalid. If a backend's device cannot be opened, every call in the context fails
   with the reason in luna_error. */
LUNA_API luna_ctx *luna_open(const luna_options *options);
/* Frees everything made from it except streams (luna_stream_close); null is fine. Contexts close in any order, but sets
   and CPU streams that read a closed context's parameters can afterwards only be closed. */
LUNA_API void luna_close(luna_ctx *ctx);

#ifndef LUNA_NO_TRAIN
/* Begins training: tape and dropout are on, activations are freed, gradients are kept. After a step that failed before
   its luna_backward was done, this begins the same step again, with the same dropout. */
LUNA_API luna_status luna_begin_step(luna_ctx *ctx);
#endif
LUNA_API luna_status luna_begin_inference(luna_ctx *ctx); /* Layers free temporaries; no tape, no dropout. */
/* A begin is either of these two. It ends all scopes and all earlier tensors, including the loss and views of
   parameters. Every call that reads an ended tensor fails the step, luna_item too (NaN). A pointer to one
   stays valid until luna_close, but from the second begin on it may be another tensor: keep the numbers. A begin fails,
   once, with the first init, luna_load_model or _of, luna_params_open, luna_params_share, luna_param or optimiser that
   failed since the begin before it. To try a file or a config whose failure should have no effect, use a separate
   context and close it. */
/* For steps that several processes share (examples/luna_ranks.h). Says, after a begin and until the next one, which
   part of a larger batch the models' inputs are. The memory's slots then depend on the whole batch's longest sequence,
   and dropout draws the whole batch's numbers if the input's n is its n (on a device: other masks for each part). */
typedef struct luna_part {
  int64_t first;          /* This many sequences of the batch precede this part. */
  int64_t longest;        /* rows of the batch's longest sequence; 0 = this part's */
  int64_t target_longest; /* the same for luna_seq2seq_forward's targets */
} luna_part;
LUNA_API luna_status luna_begin_part(luna_ctx *ctx, const luna_part *part); /* Null means whole batches. */
/* For your own models: marks x [batch,...], and what ops make of it, as sequences of that part. The built-in models
   mark the results of their embedding. Without a part it returns x itself. */
LUNA_API luna_tensor *luna_as_part(luna_tensor *x);
/* Returns the options that a context was opened with, but `threads` is the number that runs its ops. Null for null. */
LUNA_API const luna_options *luna_options_of(const luna_ctx *ctx);
/* Return the table that runs a context's ops (null for null), and this CPU's table (>>backend). */
LUNA_API const luna_backend *luna_backend_of(const luna_ctx *ctx);
LUNA_API const luna_backend *luna_cpu_backend(void);
/* Returns the status of the first failure since the last begin; LUNA_OK without one. */
LUNA_API luna_status luna_error_status(const luna_ctx *ctx);
/* Returns the instruction set that runs a context's ops; for null, luna_isa_best's. */
LUNA_API luna_isa luna_isa_of(const luna_ctx *ctx);
/* Returns the sentence of that failure, or of the newest later failure of a call that is not an op; "" without one. It
   stays valid until the next failure or begin. For a null context it says that luna_open failed. */
LUNA_API const char *luna_error(const luna_ctx *ctx);
/* Returns the id of that sentence; LUNA_ERROR_NONE without one. */
LUNA_API luna_error_id luna_error_id_of(const luna_ctx *ctx);
/* For the `return` of a custom op, an attention hook or a backend's entry: returns the given status. If it is the first
   failure, the sentence becomes the context's error, with the id LUNA_ERROR_BACKEND. */
LUNA_API luna_status luna_fail(luna_ctx *ctx, luna_status status, const char *sentence);

/* Bytes that a context uses now, and its peak, including its device. Zeros for null. */
typedef struct luna_memory_usage { size_t current, peak; } luna_memory_usage;
LUNA_API luna_memory_usage luna_memory(const luna_ctx *ctx);

/* ----------------
   >>tensors: row-major, contiguous, up to four axes; read-only to users
   Tensors made by ops and luna_tensor_new live until the next begin or the end of the scope around it. Every op returns
   null on failure and for a null input; the context says why. Tensors of two contexts in one op fail in both.
   ---------------- */
#define LUNA_MAX_RANK 4

struct luna_tensor {
  /* data is null in a context that measures, and after a scope's end or a begin has released it. grad is null until
     backward reaches it; an op's result loses it again unless luna_require_grad was called. In a view both may be out
     of date: use luna_read and luna_read_grad. */
  float *data;
  float *grad;
  int64_t shape[LUNA_MAX_RANK]; /* Axes from rank on are 1. */
  int rank;
  luna_dtype dtype;
  int device;                  /* 0 = CPU; luna_cuda.cuh: the CUDA device + 1 */
  bool needs_grad;
  bool parameter;              /* Its grad lives until close, not just for the step. */
  luna_ctx *ctx;
  struct luna_tensor *base;    /* a view's owner, or null */
  struct li_int8 *int8;        /* luna.h's own: an 8-bit weight for inference, whose data may then be null, */
  struct li_tensor_state *own; /* and how the tensor was made. */
};

/* Returns the number of elements; 0 for null. */
LUNA_API int64_t luna_count(const luna_tensor *t);
/* Makes a tensor with a copy of `values`, in row-major order, or with zeros if null. Like an op's result it ends with
   the next begin: make it again in each step. */
LUNA_API luna_tensor *luna_tensor_new(luna_ctx *ctx, const float *values, int rank, const int64_t *shape);
/* Makes a tensor whose elements all have one value. */
LUNA_API luna_tensor *luna_tensor_full(luna_ctx *ctx, float value, int rank, const int64_t *shape);

/* Scopes limit memory to the time it is needed. Every forward of a layer or model is one. Your own function that makes
   more tensors than it returns can be one too:

       luna_scope s = luna_scope_begin(ctx);
       luna_tensor *y = luna_linear(luna_gelu(luna_linear(x, w1, b1)), w2, b2);
       return luna_scope_end(s, &y, 1);

   The end releases the data of all tensors made since the beginning, except the results and what they are views of,
   what luna_keep was called for, and, in training, what backward reads and cannot compute again by a few cheap ops,
   such as norms, embeddings and activations. Scopes nest. If a scope is ended again, as in a loop over layers, the
   results of its earlier ends are released. luna_scope_end returns results[0]; any entry may be null. If results is
   null or count is below 1, it returns null and releases nothing. */
typedef struct luna_scope { luna_ctx *ctx; uint64_t own[6]; } luna_scope; /* own: luna.h's */
/* `name`, which must stay valid, is the scope's name for luna_trace; luna_scope_begin(ctx) uses the calling
   function's. */
LUNA_API luna_scope luna_scope_begin_as(luna_ctx *ctx, const char *name, bool recompute);
#define luna_scope_begin(ctx) luna_scope_begin_as(ctx, __func__, false)
/* Gradient checkpointing (arXiv 1604.06174): training keeps only the scope's results, and backward runs its ops again,
   with the same dropout. It takes less memory and gives the same gradients bit for bit. Scopes inside may be of any
   kind. */
#define luna_scope_recompute(ctx) luna_scope_begin_as(ctx, __func__, true)
LUNA_API luna_tensor *luna_scope_end(luna_scope scope, luna_tensor *const *results, int count);
/* Keeps the data of t until the next begin, and returns t. Call it before the scope ends. Null if the data were already
   released. */
LUNA_API luna_tensor *luna_keep(luna_tensor *t);

/* Before ops read t: asks luna_backward to keep t's gradient until the next begin. Returns t, or a copy of a
   view without gradient, such as luna_detach's. */
LUNA_API luna_tensor *luna_require_grad(luna_tensor *t);
/* Returns the value of a tensor of one element, before the next begin; NaN on failure. */
LUNA_API float luna_item(const luna_tensor *t);
/* Copy luna_count(t) values, or the gradient, to the host. They fail if a scope or a begin has released them
   (luna_keep), or if there is no gradient. */
LUNA_API luna_status luna_read(const luna_tensor *t, float *out);
LUNA_API luna_status luna_read_grad(const luna_tensor *t, float *out);
/* Writes, on the host, the index of the largest number in each row of x [...,n] to indices [...]. Among equals the
   first counts, and NaN beats all numbers. */
LUNA_API luna_status luna_argmax(const luna_tensor *x, int32_t *indices);
/* Sets luna_count(t) values. Fails for a tensor whose values are borrowed. */
LUNA_API luna_status luna_write(luna_tensor *t, const float *values);

#ifndef LUNA_NO_TRAIN
/* Sets the gradient of a parameter to luna_count(t) values. Without any luna_backward, luna_optimizer_step fails: call
   luna_optimizer_advance and luna_optimizer_apply. */
LUNA_API luna_status luna_write_grad(luna_tensor *t, const float *values);
/* Runs the tape backwards from a one-element tensor, adds to every .grad, and empties the tape: one backward per begin.
   If memory runs out half-way, parameters and moments stay, the gradients of all parameters become zero, and
   luna_optimizer_step fails until the next luna_backward: accumulated rounds must be repeated. */
LUNA_API luna_status luna_backward(luna_tensor *loss);
#endif
/* Returns the number of labels, targets or rows that a mean loss of luna.h divides by, without ignored ones; -1 for a
   sum and any other tensor. Processes that share a batch weight their losses by it. */
LUNA_API int64_t luna_counted(const luna_tensor *loss);
/* For your own losses: sets that number for a mean over `counted` of `targets` targets, and returns the loss. If none
   counts, options.log says so, with your call's name. */
LUNA_API luna_tensor *luna_set_counted(luna_tensor *loss, const char *name, int64_t counted, int64_t targets);

/* ----------------
   >>ops: functions of tensors, which luna_backward differentiates
   Comments give the shapes of tensors; "..." stands for any leading axes. The source is in brackets. A call copies or
   reads its arguments, including arrays and configs, before it returns.
   ---------------- */
/* Returns x in another shape with the same number of elements, as a view. One size may be -1, to be inferred. */
LUNA_API luna_tensor *luna_reshape(luna_tensor *x, int rank, const int64_t *shape);
/* Returns positions start .. start + count - 1 of an axis: a view for axis 0, a copy for another. */
LUNA_API luna_tensor *luna_slice(luna_tensor *x, int axis, int64_t start, int64_t count);
/* Returns a copy whose axis i is axis axes[i] of x. */
LUNA_API luna_tensor *luna_permute(luna_tensor *x, const int *axes);
#define LUNA_MAX_INPUTS 8 /* An op has at most this many inputs. */
/* Concatenates up to LUNA_MAX_INPUTS tensors along an axis; their other axes must be equal. */
LUNA_API luna_tensor *luna_concat(luna_tensor *const *x, int count, int axis);
/* Repeats x `count` times along a new axis 0: [...] -> [count,...]. */
LUNA_API luna_tensor *luna_expand(luna_tensor *x, int64_t count);
/* These broadcast as in NumPy: shapes are aligned at the last axis, and a size that is 1 or missing repeats; so do all
   inputs of luna_where. A comparison gives 1 or 0, without gradient. For equal numbers, minimum and maximum give the
   gradient to a; NaN in either is the result. */
LUNA_API luna_tensor *luna_add(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_sub(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_mul(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_div(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_minimum(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_maximum(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_less(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_less_equal(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_equal(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_not_equal(luna_tensor *a, luna_tensor *b);
/* Returns a where condition is not 0 (NaN is not), and b elsewhere. */
LUNA_API luna_tensor *luna_where(luna_tensor *condition, luna_tensor *a, luna_tensor *b);
/* Limits x to low .. high, which may be infinite. NaN stays NaN. The gradient passes where low <= x <= high. */
LUNA_API luna_tensor *luna_clamp(luna_tensor *x, float low, float high);
/* Return x + number, factor x and -x. */
LUNA_API luna_tensor *luna_add_scalar(luna_tensor *x, float number);
LUNA_API luna_tensor *luna_scale(luna_tensor *x, float factor);
LUNA_API luna_tensor *luna_neg(luna_tensor *x);
/* Sum and mean along an axis, which the result lacks; [n] -> [1]. */
LUNA_API luna_tensor *luna_sum(luna_tensor *x, int axis);
LUNA_API luna_tensor *luna_mean(luna_tensor *x, int axis);
/* Sum and mean of all elements -> [1]. */
LUNA_API luna_tensor *luna_sum_all(luna_tensor *x);
LUNA_API luna_tensor *luna_mean_all(luna_tensor *x);
/* Maximum along an axis, which the result lacks. The gradient goes to the first of equals. If there is a NaN, it is
   the result. */
LUNA_API luna_tensor *luna_max(luna_tensor *x, int axis);
/* Matrix products: a [...,m,k], or [...,k,m] with transpose_a, times b [...,k,n], or [...,n,k] with transpose_b ->
   [...,m,n]. b's leading axes are the last of a's leading axes; b is repeated along a's other ones. */
LUNA_API luna_tensor *luna_matmul(luna_tensor *a, luna_tensor *b, bool transpose_a, bool transpose_b);
/* x W^T + bias: x [...,in], weight W [out,in], bias [out] or null -> [...,out]. */
LUNA_API luna_tensor *luna_linear(luna_tensor *x, luna_tensor *weight, luna_tensor *bias);
/* act(x W1^T + b1) W2^T + b2 by blocks of rows, the second half of a Transformer layer [eq. 2]: x [...,in],
   w1 [hidden,in], b1 [hidden] or null, w2 [out,hidden], b2 [out] or null -> [...,out]. The config may be null. */
typedef struct luna_feed_forward_config {
  luna_activation activation;        /* 0 = ReLU */
  float activation_dropout, dropout; /* of the hidden layer; of the result */
  luna_tensor *residual;             /* [...,out], added to the result, or null */
  /* Backward computes the hidden layer again, to the same bits, instead of keeping it. */
  bool recompute;
  /* [hidden,in], and [hidden] or null. The hidden layer is then act(x W1^T + b1) times x G^T + g [arXiv 2002.05202]:
     GLU with LUNA_ACTIVATION_SIGMOID, SwiGLU with LUNA_ACTIVATION_SILU. Null: not gated. */
  luna_tensor *gate, *gate_bias;
} luna_feed_forward_config;
LUNA_API luna_tensor *luna_feed_forward(luna_tensor *x, luna_tensor *w1, luna_tensor *b1, luna_tensor *w2,
                                        luna_tensor *b2, const luna_feed_forward_config *config);
/* Functions of single numbers, named by luna_activation. luna_activate takes any of them. */
LUNA_API luna_tensor *luna_relu(luna_tensor *x);
LUNA_API luna_tensor *luna_gelu(luna_tensor *x);
LUNA_API luna_tensor *luna_elu1(luna_tensor *x);
LUNA_API luna_tensor *luna_softplus(luna_tensor *x);
LUNA_API luna_tensor *luna_softplus2(luna_tensor *x);
LUNA_API luna_tensor *luna_sigmoid(luna_tensor *x);
LUNA_API luna_tensor *luna_silu(luna_tensor *x);
LUNA_API luna_tensor *luna_tanh(luna_tensor *x);
LUNA_API luna_tensor *luna_leaky_relu(luna_tensor *x);
LUNA_API luna_tensor *luna_exp(luna_tensor *x);
LUNA_API luna_tensor *luna_log(luna_tensor *x);
LUNA_API luna_tensor *luna_sqrt(luna_tensor *x);
LUNA_API luna_tensor *luna_rsqrt(luna_tensor *x);
LUNA_API luna_tensor *luna_abs(luna_tensor *x);
LUNA_API luna_tensor *luna_activate(luna_tensor *x, luna_activation activation);
/* Softmax over the last axis. With lengths, one for each index of axis 0, entries from lengths[b] on are excluded and
   become 0; x then needs at least two axes. Null: all count. */
LUNA_API luna_tensor *luna_softmax(luna_tensor *x, const int32_t *lengths);
/* x - ln sum e^x over the last axis; exact even where a softmax is 0. */
LUNA_API luna_tensor *luna_log_softmax(luna_tensor *x);
/* Sets the rows of x [batch,n,...] from lengths[b] on to zero, whatever they hold, NaN included. Null lengths: returns
   x. */
LUNA_API luna_tensor *luna_mask(luna_tensor *x, const int32_t *lengths);
/* [...,d + 1] -> [...,d]: each row divided by its last element; 0 where that is 0. Linear attention's last step. */
LUNA_API luna_tensor *luna_ratio(luna_tensor *x);
/* Returns the same values, through which no gradient flows. */
LUNA_API luna_tensor *luna_detach(luna_tensor *x);
/* Sets elements to 0 with probability p < 1 and divides the others by 1 - p; outside training it returns x. Element e
   of the step's op number i (counting ops that drop) is dropped if half-word e mod 8 of Philox counter (e / 8, i, step)
   under key seed is below round(65536 p). Each training step changes the masks: check gradients by differences without
   dropout. */
LUNA_API luna_tensor *luna_dropout(luna_tensor *x, float probability);
/* x / sqrt(mean of x^2 + epsilon) over the last axis, times weight [last] or null. An epsilon of 0 is 1e-5. */
LUNA_API luna_tensor *luna_rms_norm(luna_tensor *x, luna_tensor *weight, float epsilon);
/* (x - mean) / sqrt(variance + epsilon) over the last axis, times weight [last] or null, plus bias [last] or null. An
   epsilon of 0 is 1e-5. */
LUNA_API luna_tensor *luna_layer_norm(luna_tensor *x, luna_tensor *weight, luna_tensor *bias, float epsilon);
/* Rotary positions [arXiv 2104.09864] for queries and keys: x [batch,n,heads d_h] -> the same shape. Row t has position
   first + t, and in each head the pair (x_i, x_(i + d_h/2)) is rotated by the angle position base^(-2i / d_h). d_h is
   even; base 0 is 10000. A sequence in pieces, each with its `first`, gives the bits of the whole. */
LUNA_API luna_tensor *luna_rotary(luna_tensor *x, int64_t heads, int64_t first, float base);
/* Looks up rows of table [V,d] for tokens [batch,n], each in 0..V - 1 -> [batch,n,d]. */
LUNA_API luna_tensor *luna_embedding(luna_tensor *table, const int32_t *tokens, int64_t batch, int64_t n);
/* x [n,...] -> [count,...]: row i is x[indices[i]]. Indices are in 0..n - 1 and may repeat. */
LUNA_API luna_tensor *luna_gather_rows(luna_tensor *x, const int32_t *indices, int64_t count);

typedef struct luna_cross_entropy_config {
  float smoothing; /* label smoothing, 0..1 */
  bool ignore; /* Ignore labels equal to ignore_index. Negative labels are always ignored. */
  int32_t ignore_index;
  /* Default: the mean over labels that count (0 if none does, with a sentence to options.log). */
  bool sum;
} luna_cross_entropy_config;
/* [...,V] and one label per row -> [1], the mean over the labels in 0..V - 1; negative labels are ignored. A logit of
   -Inf gives its class probability 0, and an infinite loss if the label or smoothing is on it; gradients stay
   finite. */
LUNA_API luna_tensor *luna_cross_entropy(luna_tensor *logits, const int32_t *labels,
                                         const luna_cross_entropy_config *config);
/* The cross-entropy of luna_linear(x, weight, bias), up to rounding: x [...,in], weight [V,in], bias [V] or null, one
   label per row of x -> [1]. Above 1024 classes neither logits nor their gradient are stored, which saves memory for
   one more product in backward. */
LUNA_API luna_tensor *luna_linear_cross_entropy(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                                const int32_t *labels, const luna_cross_entropy_config *config);

/* Values of any shape and luna_count(values) targets in the same order -> [1], the mean of (value - target)^2 over the
   targets that are not NaN (0 if all are). examples/luna_ops.h has more losses. */
LUNA_API luna_tensor *luna_mse(luna_tensor *values, const float *targets);

typedef struct luna_attention_config {
  int64_t heads;          /* 0 = 1 */
  const int32_t *lengths; /* [batch] real keys, or null; 0 gives zeros */
  const int32_t *query_offsets, *key_offsets; /* ragged: q, k, v [own rows, d]; offsets [sequences + 1] */
  int64_t sequences;      /* A ragged batch has this many, and null lengths; 0 = padded. */
  bool causal;            /* Query i sees keys j <= i. */
  bool window;            /* CPU only: query i sees keys j with -left <= j - i <= right; only these cost time. */
  int64_t left, right;    /* Both may be negative. A query that sees no key gets zeros, and -Inf below. */
  float scale;            /* 0 = 1/sqrt(head_dim) */
  float dropout;          /* of the attention matrix */
  luna_tensor **sums;     /* gets the row sums [batch, queries, heads]; or null */
  /* CPU only: gets the log-sum-exp of the scores [batch, queries, heads], which has a gradient. Not with sums or
     sequences. */
  luna_tensor **log_sum_exp;
} luna_attention_config;
/* softmax(scale Q K^T) V for each head [eq. 1]: q [batch,n,h d_h], k [batch,m,h d_h], v [batch,m,h d_v] -> [batch,n,h
   d_v]; heads are slices of the last axis. Ragged batches have no batch axis: [rows,h d]. */
LUNA_API luna_tensor *luna_softmax_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                             const luna_attention_config *config);
/* out_t = (1/t) x_t sum_{j<=t} y_j^T z_j for each head [eq. 7]: x and y [batch,n,h d1], z [batch,n,h d2] -> [batch,n,h
   d2]. */
LUNA_API luna_tensor *luna_causal_product(luna_tensor *x, luna_tensor *y, luna_tensor *z, int64_t heads);
/* A convolution over the last `width` steps, separately for each channel [arXiv 2212.14052]: x [batch,n,d], weight
   [d,width], whose last column is for the present step, bias [d] or null -> [batch,n,d]. */
LUNA_API luna_tensor *luna_short_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias);

/* The folded pack [eq. 3, projections moved to the short memory]: weights [batch,r,d] (queries times the key
   projection) and context [batch,m,d] -> softmax(weights context^T) context [batch,r,d]. Null config: the defaults. */
typedef struct luna_pack_config {
  const int32_t *lengths; /* [batch] real rows of the context; 0 gives zeros. Null: all. */
  float dropout;          /* of the attention matrix */
  luna_tensor **sums;     /* gets the row sums [batch,r,1]; or null */
} luna_pack_config;
LUNA_API luna_tensor *luna_pack(luna_tensor *weights, luna_tensor *context, const luna_pack_config *config);
/* The folded unpack [eq. 4]: softmax over each head's slots of (x k^T + bias), times v, plus out_bias: x [batch,n,d],
   k, v [batch,h,l,d], bias [batch,h,l] -> [batch,n,d]. Null config: the defaults. */
typedef struct luna_unpack_config {
  luna_tensor *out_bias;  /* [d], or null */
  const int32_t *lengths; /* [batch] real slots; null: all */
  float dropout;          /* of the attention matrix */
} luna_unpack_config;
LUNA_API luna_tensor *luna_unpack(luna_tensor *x, luna_tensor *k, luna_tensor *bias, luna_tensor *v,
                                  const luna_unpack_config *config);
/* Causal Luna attention [section 3.3] on projected q, k, v [batch,n,h d_h] and raw pack scores s [batch,n,h l]. q is
   scaled by 1/sqrt(d_h) here.
   With `forget`, which is not in the paper, the memory forgets. Slot i's key and value are means of k and v over the
   tokens so far, with weights e^s instead of omega(s), s limited to -15 .. 15. Each token first multiplies all earlier
   weights by its gate, e^max(ln(sigmoid(forget)) / 16, -1). If all gates are 1, this is the pack's softmax, made
   causal. */
typedef struct luna_causal_nested_config {
  int64_t heads;          /* 0 = 1 */
  luna_activation omega;  /* 0 = SOFTPLUS2; or SOFTPLUS, ELU1 */
  const int32_t *lengths; /* [batch] real slots; null: all */
  float dropout;          /* of the unpack matrix */
  luna_tensor *forget;    /* [batch,n,h l] logits of forget gates; null: the published form */
  int64_t horizon;        /* T without forget, as in luna_layer_config; 0 = none */
  bool routed;            /* The memory is routed: s is luna_route's w, and forget [h] says how fast slots fade. */
} luna_causal_nested_config;
LUNA_API luna_tensor *luna_causal_nested_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_tensor *s,
                                                   const luna_causal_nested_config *config);
/* Computes what each token writes into the slots of a routed memory: router [batch,n,h l], strength [batch,n,h] -> w
   [batch,n,h l]. In each head a token writes to the two slots with the largest router values R; the first of equal ones
   wins:
     r = sigmoid(R) / (the sum of both sigmoids),  w = 1 - e^{-sigmoid(strength) r};  w = 0 in other slots
   luna_causal_nested_attention with `routed` then has, for each token and slot,
     z <- (1 - w) e^{-sigmoid(forget) / 4} z + w,  key <- key + w / z (k - key),  value <- value + w / z (v - value)
   and reads with softmax(q . key / sqrt(d_h) + ln z), which leaves out slots with z < 1e-12. A slot that is not written
   keeps its key and value, and only its weight z fades. Gradients take the choice of slots as given. */
LUNA_API luna_tensor *luna_route(luna_tensor *router, luna_tensor *strength);

/* A user-defined op. forward fills out->data; backward adds to in[i]->grad (null if not wanted) from out->grad. Both
   may read the data of all tensors; both must be set, also for inference. Each op has its own copy of `state`: backward
   finds what forward wrote there. A status other than LUNA_OK fails the step; luna_fail(out->ctx, status, "why") adds
   the reason. examples/guide.md has an example. */
typedef struct luna_custom {
  luna_status (*forward)(const luna_tensor *const *in, int count, luna_tensor *out, void *state);
  luna_status (*backward)(luna_tensor *const *in, int count, const luna_tensor *out, void *state);
  const void *state;
  size_t state_size;
  size_t workspace_size; /* Each function may use this many bytes; CPU only. */
  /* On a device: the functions do the same work each time they get the same tensors, so a graph may record it. They
     read nothing back and never wait. */
  bool recordable;
  float dropout;   /* luna_custom_dropout's; 0 outside training */
  int64_t dropped; /* This many elements are numbered, sequence after sequence. */
} luna_custom;
LUNA_API luna_tensor *luna_custom_op(luna_tensor *const *in, int count, int rank, const int64_t *shape,
                                     const luna_custom *custom);
/* Inside those functions: returns the context's instruction set and threads, and the workspace, aligned to 64 bytes, as
   scratch. parallel_for is null if there is one thread. */
LUNA_API luna_run luna_custom_run(const luna_tensor *out);
/* Inside them, on the CPU: writes the dropout factors of the op's elements first .. first + count - 1, by the rule of
   luna_dropout, the same in both functions. Each is 0 or 1 / (1 - dropout). */
LUNA_API void luna_custom_dropout(const luna_tensor *out, int64_t first, int64_t count, float *factors);

/* ----------------
   >>params: named parameters, what optimisers and checkpoints go by
   ---------------- */
typedef struct luna_params luna_params;
typedef enum luna_init_kind {
  LUNA_INIT_ZEROS = 0, LUNA_INIT_ONES, LUNA_INIT_XAVIER, LUNA_INIT_NORMAL, LUNA_INIT_UNIFORM, LUNA_INIT_IDENTITY,
  LUNA_INIT_FORGET, LUNA_INIT_FADE
} luna_init_kind;
/* scale (0 = 1) is the gain of Xavier uniform, the normal's standard deviation, the uniform's bound, or the value of
   ones. LUNA_INIT_IDENTITY is for short convolutions: uniform, plus 1 in the last column, so that at first they pass
   the present on. LUNA_INIT_FORGET is for the logits of forget gates, with `scale` slots per head: slots forget with
   time constants of 8 to 1024 tokens. LUNA_INIT_FADE is for a routed memory's fade: the heads' slots fade with time
   constants of 16 to `scale` tokens. */
typedef struct luna_init { luna_init_kind kind; float scale; } luna_init;

/* Makes a tensor of random numbers: LUNA_INIT_NORMAL or LUNA_INIT_UNIFORM, with init.scale. They depend only on the
   seed and the place in the tensor: give another seed each time. It ends as those of luna_tensor_new. */
LUNA_API luna_tensor *luna_tensor_random(luna_ctx *ctx, luna_init init, uint64_t seed, int rank, const int64_t *shape);

/* Makes an empty set, for one model or layers of your own. luna_close frees it. Null: the context says why. */
LUNA_API luna_params *luna_params_open(luna_ctx *ctx);
/* Returns the set's context; null for null. */
LUNA_API luna_ctx *luna_params_ctx(const luna_params *params);
/* Makes a set that cannot be trained and reads the values of `from` in place: init the same model in it. It lets
   several contexts run one model. `from` must outlive it and not be trained meanwhile. On a device, where work is
   queued, luna_params_share, each begin and luna_stream_open order this context's later work after what `from`'s
   context has queued so far. Before `from` is trained again, wait for its readers (luna_read, luna_item). */
LUNA_API luna_params *luna_params_share(luna_ctx *ctx, const luna_params *from);
/* Makes a parameter. Its first values depend only on the context's seed and its name, which is copied. Null, and the
   context says why, if the set already has that name or there is no memory. */
LUNA_API luna_tensor *luna_param(luna_params *params, const char *name, int rank, const int64_t *shape, luna_init init);
/* Returns the parameter of that name, or null. luna_read and luna_read_grad give its values and gradient. */
LUNA_API luna_tensor *luna_params_find(const luna_params *params, const char *name);
/* Returns the parameter at an index from 0, in order of creation, or null. Unless name is null, *name becomes its name,
   which the set owns. */
LUNA_API luna_tensor *luna_params_at(const luna_params *params, int64_t index, const char **name);
/* Return the number of parameters, and the number of their floats together. */
LUNA_API int64_t luna_params_tensor_count(const luna_params *params);
LUNA_API int64_t luna_params_element_count(const luna_params *params);
/* Sets all gradients of the set to 0. */
LUNA_API luna_status luna_params_zero_grad(luna_params *params);
/* Stops training of all parameters with `name` in their names (null = all): they have no gradient, need no time or
   memory for one, and no optimiser changes them. false resumes it. LUNA_MISMATCH if no name fits. Fails between a
   forward pass and its luna_backward. */
LUNA_API luna_status luna_params_freeze(luna_params *params, const char *name, bool frozen);
/* Text pairs are saved to and loaded from the checkpoint's __metadata__. Keys and parameter names that start with
   "luna." belong to luna.h. The text from luna_params_get_text belongs to the set, and luna_params_set_text for its key
   may change it in place; it is null if there is no such key. */
LUNA_API luna_status luna_params_set_text(luna_params *params, const char *key, const char *value);
LUNA_API const char *luna_params_get_text(const luna_params *params, const char *key);

/* ----------------
   >>layers: config, init, forward. `prefix` goes before the parameter names ("layers.0."); null = "".
   A failed init makes no parameter and zeroes its struct. The forward of a zeroed struct returns null; a layer's sets a
   sentence in its input's context, but a model's cannot, since no context is known. Fields of an attention that is not
   chosen have no effect.
   ---------------- */
/* luna_linear with parameters: "PREFIX.weight" [out,in], by init, and "PREFIX.bias" [out], zeros. The prefix may end in
   the dot or not. x [...,in] -> [...,out]. */
typedef struct luna_linear_layer { luna_tensor *weight, *bias; } luna_linear_layer;
LUNA_API luna_status luna_linear_layer_init(luna_linear_layer *layer, luna_params *params, const char *prefix,
                                            int64_t in, int64_t out, luna_init init);
LUNA_API luna_tensor *luna_linear_layer_forward(const luna_linear_layer *layer, luna_tensor *x);

/* A norm over the last axis, of size dim: weight [dim], ones, and bias [dim], zeros. An RMS norm [arXiv 1910.07467] has
   no mean and no bias. */
typedef enum luna_norm_kind { LUNA_NORM_LAYER = 0, LUNA_NORM_RMS } luna_norm_kind;
typedef struct luna_norm_layer { luna_tensor *weight, *bias; } luna_norm_layer; /* bias null: RMS norm */
LUNA_API luna_status luna_norm_layer_init(luna_norm_layer *layer, luna_params *params, const char *prefix, int64_t dim,
                                          luna_norm_kind kind);
LUNA_API luna_tensor *luna_norm_layer_forward(const luna_norm_layer *layer, luna_tensor *x);

/* The embedding of a model of features: ((x - mean) scale) W^T + b, where a missing number (NaN) counts as its mean.
   Mean and scale (1 / standard deviation) are saved with the model and never trained: set them by luna_input_layer_fit
   or luna_write. If training begins without them, on numbers far from 1, options.log says so. */
typedef struct luna_input_layer {
  luna_params *params;          /* A model of tokens has only this field. */
  luna_tensor *mean, *scale;    /* "input_norm.mean", zeros, and "input_norm.scale", ones, [features] */
  luna_linear_layer projection; /* "input_proj" [dim,features] */
} luna_input_layer;
LUNA_API luna_status luna_input_layer_init(luna_input_layer *layer, luna_params *params, const char *prefix,
                                           int64_t features, int64_t dim, luna_init init);
/* Sets means and deviations from the real steps of training data, all in one input. Numbers that are not finite are
   ignored; if none is left, that is an error. A feature that never changes, or has no number left, gets scale 1. */
LUNA_API luna_status luna_input_layer_fit(luna_input_layer *layer, const luna_input *input);
/* Returns the input's features, standardised and projected: [batch,n,dim]. */
LUNA_API luna_tensor *luna_input_layer_forward(const luna_input_layer *layer, const luna_input *input);

/* How the projections are shared [section 3.1, also in version 1]: keys with values, not at all, no key projection,
   keys with queries. Section 3.1 of version 2 names W_K and W_Q by mistake: section 4.2, its tables and the authors'
   code tie W_k with W_v. */
typedef enum luna_sharing {
  LUNA_SHARING_TIED = 0, LUNA_SHARING_FULL, LUNA_SHARING_NO_KEY, LUNA_SHARING_QK
} luna_sharing;

/* Whether the memory of causal Luna attention forgets, which is not in the paper. NONE, the published form, is a mean
   over the whole past. With CONSTANT each slot forgets at a learned rate, with GATED at a rate that each token decides
   (luna_causal_nested_config). With ROUTED each token writes to two slots that a router chooses (luna_route): there is
   no P, and the layer needs 2 slots or more. It recalls single tokens better. */
typedef enum luna_forget {
  LUNA_FORGET_NONE = 0, LUNA_FORGET_CONSTANT, LUNA_FORGET_GATED, LUNA_FORGET_ROUTED /* not in decoders */
} luna_forget;
typedef enum luna_attention_kind {
  LUNA_ATTENTION_LUNA = 0, LUNA_ATTENTION_SOFTMAX, LUNA_ATTENTION_LINEAR
} luna_attention_kind;
typedef enum luna_recompute_kind {
  LUNA_RECOMPUTE_NONE = 0, LUNA_RECOMPUTE_FFN, LUNA_RECOMPUTE_LAYER
} luna_recompute_kind;

/* The config of every layer: an encoder's, a decoder's [eq. 6], a causal one's, and a single attention's. An attention
   reads dim, heads, sharing, attention_dropout, bert_init and output_gate. Luna attention also reads pack_heads; causal
   Luna attention omega, forget, memory and horizon; the others attention, causal and rotary. */
typedef struct luna_layer_config {
  int64_t dim, heads;         /* 0 = 128, 4; dim is at most 2^20 */
  int64_t pack_heads;         /* 0 = heads */
  int64_t ffn;                /* 0 = 4 dim; at most 2^22 */
  luna_sharing sharing;       /* 0 = tied; causal Luna: tied or full */
  luna_activation activation; /* feed-forward; 0 = ReLU */
  /* The feed-forward's hidden layer is act(fc1 x) fc3 x: GLU with LUNA_ACTIVATION_SIGMOID, SwiGLU with
     LUNA_ACTIVATION_SILU. */
  bool gated;
  /* For causal Luna attention without forget: 0 = SOFTPLUS2, as in the authors' code; or SOFTPLUS or ELU1, as in the
     paper's text. */
  luna_activation omega;
  bool pre_norm;              /* default: post-norm */
  luna_norm_kind norm;        /* for layers and, in models, all other norms; 0 = layer norm */
  int64_t convolution;        /* A causal layer convolves attention's input with this width; 0 = none. */
  /* For the results of attention and feed-forward, before each residual sum; in models also for embeddings and a
     classifier's features. */
  float dropout;
  float attention_dropout;    /* for attention matrices (encoder: pack and unpack; causal: unpack) */
  float activation_dropout;   /* for the feed-forward's hidden layer, after the activation */
  bool bert_init;             /* N(0, 0.02), not Xavier */
  bool causal;                /* luna_attention_layer: query i sees keys j <= i. A causal layer sets it. */
  /* 0 = Luna. Encoder and causal layers also take the others. A luna_attention_layer takes only the others; with a null
     config it is softmax attention. */
  luna_attention_kind attention;
  const luna_attention_hook *hook; /* A user-defined attention, or null. It must outlive the layer. */
  /* For a hook's init, set by models: the layer's number from 0, the number of layers (1 if tied), and the model's
     max_length. */
  int64_t layer, layers, max_length;
  /* Encoder layer: it has a learned P of its own instead of the incoming one (the paper's non-contextual P). */
  bool own_memory;
  luna_recompute_kind recompute; /* In training, backward recomputes this instead of keeping it. */
  /* out = Wo (y silu(x W_g + b_g)), where y is the heads' result; not in the paper. A hook gets silu(x W_g + b_g) as
     call->gate and must apply it. */
  bool output_gate;
  bool rotary; /* Softmax self-attention: queries and keys go through luna_rotary. */
  /* Causal Luna attention: whether its memory forgets. Use LUNA_FORGET_GATED for a model of new data: it learns better,
     and works beyond the training length without limit. */
  luna_forget forget;
  /* l, the slots of P: for an encoder, a causal layer, and an encoder layer with own_memory; with forget, the most for
     a decoder layer. 0 = 16. An encoder uses the first min(l, longest) of them for a batch of shorter sequences. */
  int64_t memory;
  /* T: in causal Luna attention that does not forget, the means are exponential from token T on. A new token then
     counts 1 / T instead of the published 1 / t, so it never counts less than in training. 0: for a model, the longest
     sequence or carried window of its set's training, which is saved with it; for a single layer, none.
     LUNA_HORIZON_NONE: none, as published. */
  int64_t horizon;
} luna_layer_config;
#define LUNA_HORIZON_NONE (-1)

/* Luna attention [eqs. 3-5]. */
typedef struct luna_nested_attention_layer {
  luna_layer_config config;
  /* tied: pk = pv = pc_proj, k = v = c_proj; no-key: pk, k empty; shared-qk: pk = pq, k = q */
  luna_linear_layer pq, pk, pv, q, k, v, out;
  luna_linear_layer gate; /* "gate_proj", with output_gate */
} luna_nested_attention_layer;
LUNA_API luna_status luna_nested_attention_layer_init(luna_nested_attention_layer *layer, luna_params *params,
                                                      const char *prefix, const luna_layer_config *config);
/* x [batch,n,d], p [batch,l,d], context [batch,m,d] (null = x), lengths [batch] of the context (null = all) -> Y_X
   [batch,n,d]; unless packed_context is null, it receives Y_P [batch,l,d]. Lengths also mask memory slots j >=
   lengths[b]. */
LUNA_API luna_tensor *luna_nested_attention_layer_forward(const luna_nested_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, luna_tensor *context, const int32_t *lengths,
                                                          luna_tensor **packed_context);

/* Causal Luna attention [section 3.3]. */
typedef struct luna_causal_attention_layer {
  luna_layer_config config;
  luna_linear_layer pq, pc, q, k, v, out;
  luna_linear_layer gate;   /* "gate_proj", with output_gate */
  luna_linear_layer forget; /* "forget_proj" [heads memory,dim]; CONSTANT has only its bias */
  luna_linear_layer router, strength; /* ROUTED: "router_proj" [heads memory,dim], "strength_proj" [heads,dim] */
  luna_tensor *fade;        /* ROUTED: "fade" [heads], in place of pq and pc */
} luna_causal_attention_layer;
LUNA_API luna_status luna_causal_attention_layer_init(luna_causal_attention_layer *layer, luna_params *params,
                                                      const char *prefix, const luna_layer_config *config);
/* x [batch,n,d], p [batch,l,d], or [l,d] for the whole batch, lengths [batch] of real memory slots (null = all) ->
   [batch,n,d]. A routed memory reads neither p nor lengths. */
LUNA_API luna_tensor *luna_causal_attention_layer_forward(const luna_causal_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, const int32_t *lengths);

/* The attentions that Luna is compared with: softmax attention [eq. 1], and linear attention with elu(x)+1 features
   [arXiv 2006.16236]. Each has projections q, k, v and out. */
typedef struct luna_attention_layer {
  luna_layer_config config;
  luna_linear_layer q, k, v, out;
  luna_linear_layer gate; /* "gate_proj", with output_gate */
} luna_attention_layer;
LUNA_API luna_status luna_attention_layer_init(luna_attention_layer *layer, luna_params *params, const char *prefix,
                                               const luna_layer_config *config);
/* x [batch,n,d], context [batch,m,d] (null = x), lengths [batch] of the context (null = all) -> [batch,n,d]. Linear
   and causal: m = n. */
LUNA_API luna_tensor *luna_attention_layer_forward(const luna_attention_layer *layer, luna_tensor *x,
                                                   luna_tensor *context, const int32_t *lengths);

/* A user-defined attention. init makes a layer's parameters, whose names start with prefix ("layers.0.self_attn."), and
   returns what forward and close receive as `layer` (later the layer's hook_state), or null on failure. forward maps
   call->x [batch,n,d] -> [batch,n,d] and does its own dropout (config has the probabilities). Both report failures by
   luna_fail. Examples: examples/attentions. A model's file stores its hook's name and what `save` gives, and
   luna_load_model finds the hook in options.hooks. If the hook has no name, the file has no luna.kind and
   luna_load_model cannot open it: init the model with the same config and hook, then call luna_load. */
typedef struct luna_attention_call {
  luna_tensor *x;              /* [batch,n,d], after the layer's norm if pre-norm */
  luna_tensor *input;          /* The layer's own input; x itself if post-norm. */
  const luna_norm_layer *norm; /* the norm between, or null */
  /* The p given to luna_encoder_layer_forward; in the library's models null, or the previous layer's next_p. */
  luna_tensor *p;
  const int32_t *lengths;      /* [batch] or null */
  bool causal;
  luna_tensor *gate;           /* With output_gate, the output projection's input is multiplied by it. */
  luna_tensor *next_p;         /* Encoder: the hook may return the next layer's p here; null leaves p. */
  /* Tensors here also stay until the next begin, such as the next segment's memory or a loss to add to the model's.
     Keep their pointers in `layer`. */
  luna_tensor *kept[4];
  /* Cross-attention, for callers of `forward`: keys, values and lengths belong to context [batch,m,d]. luna.h's layers
     give null, which means x. */
  luna_tensor *context;
} luna_attention_call;
struct luna_attention_hook {
  void *(*init)(void *user, luna_params *params, const char *prefix, const luna_layer_config *config);
  luna_tensor *(*forward)(void *layer, luna_attention_call *call);
  void *user;
  void (*close)(void *layer); /* Or null. luna_close, or an init that fails later, calls it once. */
  const char *name; /* Or null: luna_load_model then cannot open its models. */
  /* The settings in a model's file, as pairs of text, or both null. `save` passes each pair to `put`. `load` asks `get`
     for a key's value, which is null if the file has none, and stays valid until the next call. They return false on
     failure, and may give the reason by luna_fail. */
  bool (*save)(void *user, bool (*put)(void *file, const char *key, const char *value), void *file);
  bool (*load)(void *user, const char *(*get)(void *file, const char *key), void *file);
};

/* The second half of each layer: fc2 act(fc1 x) or, gated, fc2 (act(fc1 x) fc3 x), and its norm, "final_layer_norm". */
typedef struct luna_feed_forward_layer {
  luna_linear_layer fc1, fc2, fc3;
  luna_norm_layer norm;
} luna_feed_forward_layer;

/* An encoder layer, with Luna attention [eq. 6] or another one [eq. 2]. */
typedef struct luna_encoder_layer {
  luna_layer_config config;
  luna_nested_attention_layer attention;
  luna_attention_layer other_attention; /* softmax, linear; for a hook only its gate */
  void *hook_state;    /* the hook's */
  luna_tensor *memory; /* "projected_embeddings" [memory,d] */
  luna_norm_layer attention_norm, memory_norm; /* memory_norm: Luna only */
  luna_feed_forward_layer feed_forward;
} luna_encoder_layer;
LUNA_API luna_status luna_encoder_layer_init(luna_encoder_layer *layer, luna_params *params, const char *prefix,
                                             const luna_layer_config *config);
/* x [batch,n,d], *p [batch,l,d], lengths [batch] or null -> X'; *p becomes P' or a hook's next_p, else it stays. p may
   be null with own_memory (P' is then not computed) or another attention. */
LUNA_API luna_tensor *luna_encoder_layer_forward(const luna_encoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 const int32_t *lengths);

/* A decoder layer: causal Luna attention, Luna attention to the encoder's output, feed-forward. */
typedef struct luna_decoder_layer {
  luna_layer_config config;
  luna_causal_attention_layer self_attention;
  luna_nested_attention_layer cross_attention;
  luna_norm_layer self_norm, cross_norm, memory_norm;
  luna_feed_forward_layer feed_forward;
} luna_decoder_layer;
LUNA_API luna_status luna_decoder_layer_init(luna_decoder_layer *layer, luna_params *params, const char *prefix,
                                             const luna_layer_config *config);
/* x [batch,n,d], *p [batch,l,d], context [batch,m,d], the encoder's output, with lengths [batch] or null -> X'; *p
   becomes the next layer's P. */
LUNA_API luna_tensor *luna_decoder_layer_forward(const luna_decoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 luna_tensor *context, const int32_t *lengths);

/* A language model's layer: causal attention, with a learned memory of its own if it is Luna's, and feed-forward. */
typedef struct luna_causal_layer {
  luna_layer_config config;
  luna_tensor *memory;      /* "projected_embeddings" [l,d]; Luna only */
  luna_tensor *kernel;      /* "conv.weight" [d,width], null without */
  luna_tensor *kernel_bias; /* "conv.bias" [d] */
  luna_causal_attention_layer attention;
  luna_attention_layer other_attention; /* softmax, linear; for a hook only its gate */
  void *hook_state;         /* the hook's */
  luna_norm_layer attention_norm;
  luna_feed_forward_layer feed_forward;
} luna_causal_layer;
LUNA_API luna_status luna_causal_layer_init(luna_causal_layer *layer, luna_params *params, const char *prefix,
                                            const luna_layer_config *config);
/* x [batch,n,d] -> [batch,n,d]. */
LUNA_API luna_tensor *luna_causal_layer_forward(const luna_causal_layer *layer, luna_tensor *x);

/* ----------------
   >>models: config, init, forward of a luna_input. Inits and loads fail as in >>layers.
   model.config has the defaults instead of zeros.
   ---------------- */
/* A causal language model: embedding, causal layers, logits tied to the embedding. With features or its own outputs it
   predicts classes or values at each step, as a detector or a forecaster. */
typedef struct luna_lm_config {
  int64_t vocab;            /* 0 = 256, bytes */
  int64_t features;         /* A step has this many numbers instead of a token; 0 = tokens. */
  /* Outputs per step, by a separate matrix; 0 = the next token's logits, or for features as many as features. */
  int64_t outputs;
  int64_t layers;           /* 0 = 2 */
  /* For every layer: dim, heads, ffn, memory, ...; attention: Luna, softmax, linear, or a hook. */
  luna_layer_config layer;
  luna_positions positions; /* 0 = none */
  int64_t max_length;       /* Learned positions end here; 0 = 512. */
  /* For outputs that are values: they are the matrix's results times a deviation, plus a mean, so that the learned
     numbers are of size 1 (luna_lm_fit_outputs). */
  bool output_norm;
} luna_lm_config;
typedef struct luna_lm {
  luna_lm_config config;
  luna_params *params;
  luna_tensor *embedding;    /* "embed_tokens.weight" [vocab,d]; for features null, and */
  luna_input_layer input;    /* "input_norm", "input_proj" */
  luna_tensor *positions;    /* "embed_positions.weight" [max_length,d], learned only */
  luna_causal_layer *layers; /* "layers.N." */
  luna_norm_layer norm;      /* "layer_norm", pre-norm only */
  luna_linear_layer output;  /* "output_projection" [outputs,d], with outputs only */
  /* "output_norm.mean", zeros, and "output_norm.scale", ones, [outputs], only with output_norm; never trained. */
  luna_tensor *output_mean, *output_scale;
} luna_lm;
LUNA_API luna_status luna_lm_init(luna_lm *model, luna_params *params, const luna_lm_config *config);
/* Returns logits [batch,n,vocab] or [batch,n,outputs]. No position reads a later one, so lengths change nothing before
   a sequence's end and may be null. With lengths, features in the padding count as missing, and luna_lm_loss ignores
   the labels there. Fails in training if output_norm's means and deviations were never set (luna_lm_fit_outputs,
   luna_write or a load). */
LUNA_API luna_tensor *luna_lm_forward(const luna_lm *model, const luna_input *input);
/* Returns the mean loss of those logits for labels [batch,n]: each position's next token (the caller shifts) or, with
   .outputs, its class. Negative labels and those beyond input.lengths are ignored. It equals luna_cross_entropy up to
   rounding, but logits of a large vocabulary are not stored (luna_linear_cross_entropy). */
LUNA_API luna_tensor *luna_lm_loss(const luna_lm *model, const luna_input *input, const int32_t *labels);

/* For a model with output_norm: sets each output's mean and deviation from all training targets [rows,outputs], by the
   rules of luna_input_layer_fit. */
LUNA_API luna_status luna_lm_fit_outputs(luna_lm *model, const float *targets, int64_t rows);

/* An encoder: embeddings and encoder layers, as part of the models below. The embeddings' default scale is sqrt(dim),
   or 1 with learned positions. */
typedef enum luna_embedding_scale {
  LUNA_EMBEDDING_SCALE_DEFAULT = 0, LUNA_EMBEDDING_SCALE_ONE, LUNA_EMBEDDING_SCALE_SQRT_DIM
} luna_embedding_scale;
typedef struct luna_encoder_config {
  int64_t features;         /* A step has this many numbers instead of a token; 0 = tokens. */
  int64_t layers;           /* 0 = 2 */
  luna_positions positions; /* 0 = sinusoidal */
  int64_t max_length;       /* Learned positions and some hooks end here; 0 = 512. */
  int64_t first_position;   /* the first token's; the authors' is padding index + 1 */
  luna_embedding_scale embedding_scale; /* s in x = s E[token] + position; scales P but not features */
  bool norm_embedding;      /* A layer norm follows both embeddings. */
  bool tied_layers;         /* One layer is applied `layers` times. */
  /* Keep the outputs at padded positions, as in the authors' translation model. Default: zeros. */
  bool keep_padding;
  luna_layer_config layer;  /* for every layer: dim, heads, ffn, memory, ... */
} luna_encoder_config;
typedef struct luna_encoder {
  luna_encoder_config config;
  luna_params *params;
  luna_tensor *embedding;            /* "embed_tokens.weight" [vocab,d]; for features null, and */
  luna_input_layer input;            /* "input_norm", "input_proj" */
  luna_tensor *positions;            /* "embed_positions.weight" [first_position + max_length,d], learned only */
  luna_tensor *memory;               /* "projected_embeddings" [l,d], Luna only */
  luna_norm_layer embedding_norm, memory_embedding_norm; /* "emb_layer_norm", "proj_emb_layer_norm" */
  luna_encoder_layer *layers;        /* "layers.N." */
  luna_norm_layer norm, memory_norm; /* "layer_norm", "proj_layer_norm", pre-norm only */
} luna_encoder;
LUNA_API luna_status luna_encoder_init(luna_encoder *encoder, luna_params *params, const char *prefix, int64_t vocab,
                                       const luna_encoder_config *config); /* vocab 0 = 256, bytes; not for features */
/* Returns the first layer's input X [batch,n,d]. If *p is null, it becomes the learned P [batch,l,d]. */
LUNA_API luna_tensor *luna_encoder_embed(const luna_encoder *encoder, const luna_input *input, luna_tensor **p);
/* Returns the last layer's X [batch,n,d]. *p comes in null, or as the memory that the previous segment left
   (luna_detach stops its gradient; luna_read and luna_tensor_new carry it over a begin), and becomes the memory that
   this segment leaves [sections 5, 6]. p may be null. */
LUNA_API luna_tensor *luna_encoder_forward(const luna_encoder *encoder, const luna_input *input, luna_tensor **p);

/* A classifier, also of each step. With another loss (luna_mse) it does regression, and a class is a value. */
typedef enum luna_pooling {
  LUNA_POOLING_DEFAULT = 0, /* the memory; without one the mean */
  LUNA_POOLING_CLS,         /* X[0] */
  LUNA_POOLING_MEAN,        /* mean of X over real tokens */
  LUNA_POOLING_MEMORY,      /* mean of P over each sequence's min(l, length) real slots [version 2, table 3] */
  LUNA_POOLING_MEMORY_BATCH /* mean of P over the batch's min(l, longest) slots, as in the authors' code */
} luna_pooling;
typedef struct luna_classifier_config {
  int64_t vocab;      /* 0 = 256, bytes */
  int64_t classes;    /* 0 = 2 */
  luna_pooling pooling;
  int64_t pre_logits; /* A GELU layer of this width precedes the logits; 0 = none. */
  bool pair;          /* two inputs; features a, b, ab, a - b */
  bool per_step;      /* Every step has logits, from X, without pooling. */
  luna_encoder_config encoder;
} luna_classifier_config;
typedef struct luna_classifier {
  luna_classifier_config config;
  luna_params *params;
  luna_encoder encoder;         /* "encoder." */
  luna_linear_layer pre_logits; /* "pre_logits.0" */
  luna_tensor *projection;      /* "sentence_projection_layer.weight" [classes, features] */
} luna_classifier;
LUNA_API luna_status luna_classifier_init(luna_classifier *model, luna_params *params,
                                          const luna_classifier_config *config);
/* Returns logits [batch,classes], or with per_step [batch,n,classes], where luna_cross_entropy needs label -1 for
   padding. They depend on the rest of the batch only with LUNA_POOLING_MEMORY_BATCH. */
LUNA_API luna_tensor *luna_classifier_forward(const luna_classifier *model, const luna_input *input);
/* Returns logits [batch,classes] for pairs, given as two inputs of one batch; needs config.pair. */
LUNA_API luna_tensor *luna_classifier_forward_pair(const luna_classifier *model, const luna_input *first,
                                                   const luna_input *second);
/* Pools what luna_encoder_forward made -> [batch,d], before pre_logits and projection. Of x and p, the one that the
   model does not pool may be null. */
LUNA_API luna_tensor *luna_classifier_pool(const luna_classifier *model, luna_tensor *x, luna_tensor *p,
                                           const int32_t *lengths);

/* A masked language model: an encoder and the head LN(gelu(x Wd)) E^T + b. */
typedef struct luna_masked_lm_config {
  int64_t vocab; /* 0 = 257: bytes, and 256 for the mask. With features: the classes. */
  luna_encoder_config encoder;
} luna_masked_lm_config;
typedef struct luna_masked_lm {
  luna_masked_lm_config config;
  luna_params *params;
  luna_encoder encoder;    /* "encoder." */
  luna_linear_layer dense; /* "lm_head.dense" */
  luna_norm_layer norm;    /* "lm_head.layer_norm" */
  luna_tensor *output;     /* the encoder's embedding; for features "lm_head.weight" [vocab,d] */
  luna_tensor *bias;       /* "lm_head.bias" [vocab] */
} luna_masked_lm;
LUNA_API luna_status luna_masked_lm_init(luna_masked_lm *model, luna_params *params,
                                         const luna_masked_lm_config *config);
/* Returns logits [batch,n,vocab]. */
LUNA_API luna_tensor *luna_masked_lm_forward(const luna_masked_lm *model, const luna_input *input);
/* Returns the mean loss over positions whose label, in labels [batch,n], is neither negative nor beyond input.lengths.
   Only these positions' logits are computed. */
LUNA_API luna_tensor *luna_masked_lm_loss(const luna_masked_lm *model, const luna_input *input, const int32_t *labels);

/* An encoder-decoder, for translation. */
typedef struct luna_seq2seq_config {
  int64_t vocab;             /* the source's; 0 = 256, bytes */
  int64_t target_vocab;      /* 0 = vocab */
  bool share_embeddings;     /* Source, target and output share one; vocab = target_vocab. */
  bool separate_output;      /* Logits have a matrix of their own. Default: the target's embedding. */
  int64_t decoder_layers;    /* 0 = encoder.layers */
  int64_t max_target_length; /* learned positions; 0 = encoder.max_length */
  /* Its layer config is also the decoder's. Attention: Luna. Default scale: sqrt(dim). */
  luna_encoder_config encoder;
} luna_seq2seq_config;
typedef struct luna_seq2seq {
  luna_seq2seq_config config;
  luna_params *params;
  luna_encoder encoder;       /* "encoder." */
  luna_tensor *embedding;     /* "decoder.embed_tokens.weight" [target_vocab,d], or the encoder's */
  luna_tensor *positions;     /* "decoder.embed_positions.weight", learned only */
  luna_decoder_layer *layers; /* "decoder.layers.N." */
  /* "decoder.layer_norm", "decoder.proj_layer_norm" (which nothing reads), only if pre-norm. */
  luna_norm_layer norm, memory_norm;
  luna_tensor *output;        /* "decoder.output_projection.weight" [target_vocab,d], or the embedding */
} luna_seq2seq;
LUNA_API luna_status luna_seq2seq_init(luna_seq2seq *model, luna_params *params, const luna_seq2seq_config *config);
/* Returns logits [batch,m,target_vocab] for the source [batch,n] and the target so far [batch,m]. The target's padding
   has a zero embedding and needs label -1. */
LUNA_API luna_tensor *luna_seq2seq_forward(const luna_seq2seq *model, const luna_input *source,
                                           const luna_input *target);
/* Returns luna_cross_entropy of these logits for labels [batch,m], ignoring those beyond target.lengths. Above 1024
   words neither logits nor their gradient are stored. Null config: the mean, without smoothing. */
LUNA_API luna_tensor *luna_seq2seq_loss(const luna_seq2seq *model, const luna_input *source, const luna_input *target,
                                        const int32_t *labels, const luna_cross_entropy_config *config);

/* ----------------
   >>trainer
   ---------------- */
#ifndef LUNA_NO_TRAIN
/* A factor on the learning rate, which depends only on the step (from 1): linear warm-up, then a decay. */
typedef enum luna_decay {
  LUNA_DECAY_CONSTANT = 0, LUNA_DECAY_INVERSE_SQRT, LUNA_DECAY_LINEAR, LUNA_DECAY_COSINE, LUNA_DECAY_MILESTONES
} luna_decay;
typedef struct luna_schedule {
  luna_decay decay;
  int64_t warmup;       /* steps from warmup_from to 1 */
  int64_t total;        /* linear, cosine: `floor` is reached at this step */
  float floor;          /* the smallest factor */
  float warmup_from;    /* the factor at step 0 */
  int64_t milestone[4]; /* Each multiplies the factor by gamma after its step; 0 = no more. */
  float gamma;          /* 0 = 0.1 */
} luna_schedule;
/* Returns the factor at a step, from 1 on; 1 for a null schedule. */
LUNA_API float luna_schedule_at(const luna_schedule *schedule, int64_t step);

typedef struct luna_optimizer luna_optimizer;
/* The config of every optimiser. 0 is the default, and fields that an optimiser does not use have no effect. */
typedef struct luna_optimizer_config {
  float lr;       /* 0 = 1e-3; SGD: 0.01 */
  float momentum; /* SGD; below 1 */
  bool nesterov;  /* SGD with momentum */
  float beta1;    /* Adam, AdamW; 0 = 0.9 */
  float beta2;    /* Adam, AdamW; 0 = 0.999 */
  float epsilon;  /* 0 = 1e-8 */
  float weight_decay; /* AdamW: decoupled; others: added to the gradient; 0 = none */
  float clip;     /* limits the global gradient norm; 0 = none */
  float average;  /* A moving average of each parameter decays by this, 0.999 say; 0 = none. */
  luna_schedule schedule;
  /* This many skipped steps in a row give LUNA_NOT_FINITE; 0 = 10, negative = never. */
  int64_t max_skips;
} luna_optimizer_config;
/* An optimiser trains all parameters of the set. Later ones join at the next step, with zero moments. luna_close frees
   it. Null config: defaults. */
LUNA_API luna_optimizer *luna_sgd(luna_params *params, const luna_optimizer_config *config);
LUNA_API luna_optimizer *luna_adam(luna_params *params, const luna_optimizer_config *config);  /* arXiv 1412.6980 */
LUNA_API luna_optimizer *luna_adamw(luna_params *params, const luna_optimizer_config *config); /* arXiv 1711.05101 */

/* An optimiser of your own, such as examples/luna_apollo.h. `reduce` and `update` run on the CPU, on several threads at
   once, each for some elements of a parameter, and keep no state. A device runs only hooks that it knows by name
   (luna_backend.knows); luna_optimizer_open refuses others there. */
typedef struct luna_optimizer_part {
  float *value;     /* [count], one element or many, which `update` changes */
  const float *grad; /* before clipping */
  float *moment[3]; /* the optimiser's numbers per value, at first 0; null: none */
  int64_t count;
  float lr, decay;  /* this parameter's learning rate and weight decay in this step */
  float factor;     /* Clipping makes the gradient grad[i] * factor. */
  int64_t step;     /* updates so far, including this one */
  const luna_optimizer_config *config;
  luna_isa isa;     /* the context's kernels' */
} luna_optimizer_part;
typedef struct luna_optimizer_hook {
  const char *name; /* luna_save_training stores it; luna_load_training compares it. */
  int moments;      /* 0 to 3; saved and loaded with the training */
  bool from_zero;   /* The schedule counts this optimiser's steps from 0, not 1. */
  float largest;    /* If clipping leaves a larger gradient norm, the step is skipped; 0 = 1e18. */
  /* Sets all four sums of the part, from values before the step; or null. `update` gets the whole parameter's sums. */
  void (*reduce)(const luna_optimizer_part *part, double sums[4]);
  void (*update)(const luna_optimizer_part *part, const double sums[4]); /* luna.h zeroes the gradient afterwards. */
} luna_optimizer_hook;
/* The hook must outlive the optimiser. The hook reads the config as it is, but an lr of 0 becomes 1e-3. */
LUNA_API luna_optimizer *luna_optimizer_open(luna_params *params, const luna_optimizer_hook *hook,
                                             const luna_optimizer_config *config);

/* Overrides learning rate and decay for some parameters, including those that join later. With { .max_rank = 1,
   .decay_factor = -1 } norms and biases have no decay. luna_params_freeze stops training altogether. */
typedef struct luna_param_group {
  const char *name;   /* matches names that contain it; null = any */
  int max_rank;       /* matches at most this many axes; 0 = any */
  float lr_factor;    /* multiplies the learning rate; 0 = 1, negative = 0 */
  float decay_factor; /* multiplies the weight decay; 0 = 1, negative = 0 */
} luna_param_group;
/* Adds a copy of the group. The last group that fits a parameter applies. LUNA_MISMATCH if it fits none. */
LUNA_API luna_status luna_optimizer_add_group(luna_optimizer *optimizer, const luna_param_group *group);

/* Exchanges the parameters with their averages. With a = config.average, after update t an average moves to its
   parameter by (1 - a) / (1 - a^t) of the difference, so initial values leave no trace. Validate or save between two
   such calls; updates, and luna_save_training, fail there. Parameters that no update has reached stay as they are. */
LUNA_API luna_status luna_optimizer_swap_average(luna_optimizer *optimizer);

/* Uses and zeroes the gradients. A parameter that no luna_backward has reached has none and stays as it is, even with
   weight decay. If a call since the last begin failed, or there was no luna_backward since this optimiser's last step,
   it changes nothing and returns that failure. A NaN or Inf in the loss or a gradient skips the update. So does a norm
   above 1e18 (a hook's `largest`) after clipping, since moments could become Inf. Parameters then stay as they are, the
   next luna_item or luna_read reports it to options.log, and luna_optimizer_skipped counts it. After max_skips such
   steps in a row it returns LUNA_NOT_FINITE until a step is good; on a device, it knows this from the last luna_item or
   luna_read. */
LUNA_API luna_status luna_optimizer_step(luna_optimizer *optimizer);
/* Its two halves: advance sets the step's learning rate, and apply does the rest, with the gradients as they are. */
LUNA_API luna_status luna_optimizer_advance(luna_optimizer *optimizer);
LUNA_API luna_status luna_optimizer_apply(luna_optimizer *optimizer);
/* Sets the learning rate that the schedule multiplies. */
LUNA_API luna_status luna_optimizer_set_lr(luna_optimizer *optimizer, float lr);
/* Returns the current rate, with the schedule at the last step; before any step, at the first. */
LUNA_API float luna_optimizer_lr(const luna_optimizer *optimizer);
/* Return the numbers of updates made, and of those skipped as not finite. */
LUNA_API int64_t luna_optimizer_steps(const luna_optimizer *optimizer);
LUNA_API int64_t luna_optimizer_skipped(const luna_optimizer *optimizer);
/* Returns the global norm of the last step's gradients, before clipping; Inf above FLT_MAX. */
LUNA_API float luna_optimizer_grad_norm(const luna_optimizer *optimizer);
#endif

/* ----------------
   >>checkpoints: safetensors. All or nothing: a failed load changes no parameter, a failed save leaves the old file
   whole.
   ---------------- */
typedef struct luna_io {
  bool (*read)(void *user, void *bytes, size_t size); /* exactly size bytes */
  bool (*write)(void *user, const void *bytes, size_t size);
  void *user;
  uint64_t size; /* bytes that can be read */
} luna_io;
/* The place of a file, made by one of these calls. luna_path: a file by name. luna_bytes: bytes in memory, to read.
   luna_buffer: memory to write to; *written becomes the file's size, even if that exceeds the capacity and the call
   fails, so a null buffer of capacity 0 asks for the size. luna_callbacks: functions. */
typedef struct luna_file {
  const char *path;
  const void *bytes;
  void *buffer;
  size_t size, *written;
  const luna_io *io;
} luna_file;
#ifndef LUNA_NO_STDIO
/* Saving writes a new file (.luna-<n>.tmp in that folder), flushes it, and gives it the old one's place and mode. If
   several save at once, the last counts. A symbolic link stays, and its target is replaced or created; any other file
   that is not a regular one is an error. */
LUNA_API luna_file luna_path(const char *path);
#endif
LUNA_API luna_file luna_bytes(const void *bytes, size_t size);
LUNA_API luna_file luna_buffer(void *buffer, size_t capacity, size_t *written);
LUNA_API luna_file luna_callbacks(const luna_io *io);

/* Saves the set's parameters as F32, and its text pairs. */
LUNA_API luna_status luna_save(const luna_params *params, luna_file file);
#ifndef LUNA_NO_INT8
/* The same in about a quarter of the bytes: products' matrices and embeddings are rounded to I8, with their rows'
   scales as NAME.scale. A matrix stays F32 if the set has a parameter of that name. Every call that loads a file reads
   it; in a set its values are float. */
LUNA_API luna_status luna_save_int8(const luna_params *params, luna_file file);
#endif
/* Copies the values into a set whose parameters have the file's names and shapes. If the file has a model's config, the
   set's model must have the same one, except for dropouts, horizon and max_length. Each call that opens a file borrows
   step memory: the file's size (not for luna_bytes) and 8 bytes per tensor and pair. */
LUNA_API luna_status luna_load(luna_params *params, luna_file file);
/* Loads each parameter whose name and shape the file has, such as a pre-trained encoder into a classifier.
   LUNA_MISMATCH if nothing matches. `report`, unless null, is called with a reason for each parameter left unchanged
   and each tensor not used. */
typedef struct luna_load_report {
  void (*report)(void *user, const char *name, const char *why);
  void *user;
  int64_t loaded, missing, unused; /* parameters loaded, parameters left unchanged, tensors not used */
} luna_load_report;
LUNA_API luna_status luna_load_matching(luna_params *params, luna_file file, luna_load_report *report);
/* Lists the text pairs, then the tensors, of any safetensors file, in the file's order. Arguments are valid during the
   call. */
typedef struct luna_file_tensor {
  const char *name, *dtype; /* "F32", "I64", ... */
  int rank;
  int64_t shape[8], count;
  const void *data; /* within the file, at any alignment, little-endian */
  size_t bytes;
} luna_file_tensor;
typedef struct luna_inspection {
  void (*pair)(void *user, const char *key, const char *value);
  void (*tensor)(void *user, const luna_file_tensor *entry);
  void *user;
} luna_inspection;
LUNA_API luna_status luna_inspect(luna_ctx *ctx, luna_file file, const luna_inspection *inspection);
/* Writes the tensor's values as floats to out [count]; LUNA_UNSUPPORTED when they are not F32, F16, BF16 or F64. */
LUNA_API luna_status luna_file_tensor_read(const luna_file_tensor *entry, float *out);

/* Opens the model that a checkpoint describes: init and load in one. params must be empty. The file's sizes are checked
   against its tensors. A model's attention hook must be in options.hooks. */
typedef enum luna_model_kind {
  LUNA_MODEL_LM = 1, LUNA_MODEL_CLASSIFIER, LUNA_MODEL_MASKED_LM, LUNA_MODEL_SEQ2SEQ
} luna_model_kind;
typedef struct luna_model {
  luna_model_kind kind; /* tells which member below is initialised */
  luna_lm lm;
  luna_classifier classifier;
  luna_masked_lm masked_lm;
  luna_seq2seq seq2seq;
} luna_model;
LUNA_API luna_status luna_load_model(luna_model *model, luna_params *params, luna_file file);
/* Opens a model of one kind: `model` points to the struct of that kind (luna_lm, luna_classifier, luna_masked_lm or
   luna_seq2seq), which no compiler checks. */
LUNA_API luna_status luna_load_model_of(luna_model_kind kind, void *model, luna_params *params, luna_file file);

#ifndef LUNA_NO_TRAIN
/* Exact resume: saves parameters, the optimiser's moments and counters, and the context's seed and step. A run loaded
   from it continues with the same bits. The file is also a checkpoint of the model. The position in the data is the
   caller's task: luna_params_set_text before, luna_params_get_text after. Save after luna_optimizer_step: gradients are
   not saved, and are zero after loading. Load into an optimiser of the same kind and config; the file's lr replaces its
   own. */
LUNA_API luna_status luna_save_training(const luna_optimizer *optimizer, luna_file file);
LUNA_API luna_status luna_load_training(luna_optimizer *optimizer, luna_file file);
#endif

/* ----------------
   >>stream: a causal language model with Luna attention, one token at a time, in constant memory
   A stream only reads its weights: use one thread per stream, and any number of streams on one model. The stream of a
   model on a device is stored and runs there; only tokens and logits are copied. Use it in the thread of its model's
   context, on whose stream its work is queued, and close it before that context. When the device fails, a step returns
   null, and so do all later ones. A saved state loads on host and device alike.
   ---------------- */
typedef struct luna_stream luna_stream;
typedef struct luna_stream_config {
  int64_t batch;   /* sequences side by side; 0 = 1 */
  int64_t chunk;   /* rows per prefill pass; 0 = 64 */
  luna_isa isa;    /* 0 = best; not on a device */
  int64_t horizon; /* as in luna_layer_config; 0 = the model's */
  /* LUNA_DTYPE_I8: products as in luna_options.weights. The stream's copy takes about 0.26 of the weights' bytes. CPU
     only. 0 = as the file stores them, or as the model's context says. */
  luna_dtype weights;
} luna_stream_config;
/* Open a stream from a safetensors checkpoint in memory, F32 or from luna_save_int8, 4-byte aligned, on a little-endian
   host. It is read in place, without context or allocator. memory has luna_stream_size bytes. Null on failure: *error
   then gives the reason, perhaps in memory.
   These two take about 13 KB of stack on 64-bit machines, a step or a prefill 10 KB, and less with LUNA_NO_SIMD; all
   together 10.6 KB on a Cortex-M4 (gcc -Os). */
LUNA_API size_t luna_stream_size(const void *bytes, size_t size, const luna_stream_config *config, const char **error);
LUNA_API luna_stream *luna_stream_open_bytes(const void *bytes, size_t size, const luna_stream_config *config,
                                             void *memory, size_t memory_size, const char **error);
/* Opens a stream of a model with Luna attention, after training. It copies the weights that it folds (luna_form) and
   reads the others in place. It takes its memory at once, from the allocator of the model's context or from the device;
   a step takes none. Null: the context says why. */
LUNA_API luna_stream *luna_stream_open(const luna_lm *model, const luna_stream_config *config);
/* Null is fine. A stream on the CPU may be closed after its model's context. */
LUNA_API void luna_stream_close(luna_stream *stream);
/* Returns logits [batch,vocab] or [batch,outputs] after one token of each sequence, valid until the next call; null on
   failure. */
LUNA_API const float *luna_stream_step(luna_stream *stream, const int32_t *tokens);
/* The same for a model of features: [batch,features], NaN if missing -> [batch,outputs]. A sequence with a feature
   that luna_input does not allow skips the step: its logits are NaN, its state stays, and LUNA_ERROR_STREAM_FEATURE
   says so. Positions, and t in eq. 7, count skipped steps. Null if that is every sequence. These three calls also
   return logits that are not finite for another reason, and say so (LUNA_ERROR_STREAM_NOT_FINITE); no state becomes
   Inf or NaN. */
LUNA_API const float *luna_stream_step_features(luna_stream *stream, const float *features);
/* Returns logits after the last row of an input whose batch is the stream's, or 0, and whose lengths are null. Null,
   without reading a row, for a feature that luna_input does not allow. */
LUNA_API const float *luna_stream_prefill(luna_stream *stream, const luna_input *input);
/* Return what was wrong in the last call, except luna_stream_state_save, and its id; "" and LUNA_ERROR_NONE if it
   was fine. */
LUNA_API const char *luna_stream_error(const luna_stream *stream);
LUNA_API luna_error_id luna_stream_error_id(const luna_stream *stream);
/* Returns the number of tokens that each sequence has read or skipped. */
LUNA_API int64_t luna_stream_position(const luna_stream *stream);
/* Starts all sequences anew. */
LUNA_API void luna_stream_reset(luna_stream *stream);
/* Lets each sequence b continue from sequence from[b], with from [batch] (beam search). */
LUNA_API luna_status luna_stream_reorder(luna_stream *stream, const int32_t *from);
/* These return a saved state's size in bytes, write one of that size, and read one from the same model sizes and batch.
   Its bytes are in this machine's order, and another minor version of luna.h may refuse them: keep checkpoints for
   years, not states. A state that does not fit changes nothing. */
LUNA_API size_t luna_stream_state_size(const luna_stream *stream);
LUNA_API luna_status luna_stream_state_save(const luna_stream *stream, void *bytes, size_t size);
LUNA_API luna_status luna_stream_state_load(luna_stream *stream, const void *bytes, size_t size);

/* A state carried from one luna_lm_forward or luna_lm_loss to the next, in training too: windows of a long text then
   continue one another. No gradient flows into the past. CPU only; Luna attention only, with attention_dropout only
   if the memory forgets. It belongs to the model's context. For a set, luna_save_training saves the state that
   training continued last, or else the first opened, and luna_load_training restores it; if none is open it is
   dropped, with a message to options.log. Null: the context says why. */
typedef struct luna_lm_state luna_lm_state;
LUNA_API luna_lm_state *luna_lm_state_open(const luna_lm *model, int64_t batch);
/* After a begin: the step's forward pass of the state's model, with `batch` sequences and null lengths, continues from
   the state and updates it after its last row, unless the step fails before its luna_backward is done. One per
   step. */
LUNA_API luna_status luna_lm_state_continue(luna_lm_state *state);
/* Between a begin and luna_lm_state_continue, like luna_lm_state_load: restarts `count` sequences, or all with null. */
LUNA_API luna_status luna_lm_state_restart(luna_lm_state *state, const int32_t *sequences, int64_t count);
/* The bytes are those of luna_stream_state_save for a stream of the same model and batch; either side loads the
   other's. Sequences at different positions can be saved only if the memory forgets (LUNA_FORGET_...) and the model has
   no embedding of positions. */
LUNA_API size_t luna_lm_state_size(const luna_lm_state *state);
LUNA_API luna_status luna_lm_state_save(const luna_lm_state *state, void *bytes, size_t size);
LUNA_API luna_status luna_lm_state_load(luna_lm_state *state, const void *bytes, size_t size);

typedef struct luna_sampling {
  float temperature; /* divides logits; 0 = greedy, the likeliest token */
  int32_t top_k;  /* 0 = all */
  uint64_t seed;
  uint64_t drawn; /* numbers drawn so far, counted by luna_sample */
} luna_sampling;
/* Returns a token; null sampling is greedy. Returns -1 for null logits or NaN, or if temperature or top_k is negative
   or not finite. examples/luna_ops.h samples by top_p. */
LUNA_API int32_t luna_sample(const float *logits, int64_t vocab, luna_sampling *sampling);

/* Opens an encoder-decoder's decoder as a stream, with `beam` sequences per source (sequence b beam + i continues
   source b). The sources are encoded and packed here, once; a token then costs the same at any length. It begins an
   inference on the model's context. beam: 0 = 1. */
LUNA_API luna_stream *luna_seq2seq_stream_open(const luna_seq2seq *model, const luna_input *source, int64_t beam);
typedef struct luna_generate_config {
  int32_t begin, end; /* a target's first token, and its last */
  int64_t max_length; /* A result has at most this many tokens, without its end; 0 = 2 n + 10. */
} luna_generate_config;
/* Begins an inference and translates greedily: source [batch,n] -> out [batch,max_length] with out_lengths [batch],
   without begin and end. No argument may be null. */
LUNA_API luna_status luna_seq2seq_generate(const luna_seq2seq *model, const luna_input *source,
                                           const luna_generate_config *config, int32_t *out, int32_t *out_lengths);

/* ----------------
   >>functions: the kernels by themselves, for use in another engine; no context, no allocation
   Strides are in floats, 0 = dense, never negative. Rows that are read may overlap; what is written must not. An array
   spans at most 2^47 floats: beyond that, and for arguments that are null or not finite, the result is
   LUNA_BAD_ARGUMENT. A call uses the caller's thread, or at most `threads` tasks (and 256) through parallel_for, with
   the same bits. It needs luna_..._scratch(&args) bytes of scratch. With null scratch a forward call uses at most 8 KB
   of stack, is slower, and may return LUNA_OUT_OF_MEMORY; a backward call always does.
   LUNA_ISA_REFERENCE has no backward pass: LUNA_UNSUPPORTED. Nothing is written on failure.
   ---------------- */

/* C = act(scale A B + bias) (+ C): A [m, k], B [k, n], C [m, n], `batch` times. */
typedef struct luna_gemm_args {
  const float *a, *b, *bias;     /* bias [n] or null */
  float *c;
  int64_t m, n, k, batch;        /* batch 0 = 1 */
  bool transpose_a, transpose_b; /* A is stored [k, m], B [n, k]. */
  int64_t a_row, b_row, c_row;   /* stored rows' strides, in floats */
  int64_t a_batch, b_batch, c_batch; /* between products; for A and B LUNA_BATCH_SHARED: the same for all */
  float scale;                   /* 0 = 1 */
  luna_activation activation;
  bool accumulate;               /* add to C */
  luna_run run;
} luna_gemm_args;
LUNA_API luna_status luna_gemm_f32(const luna_gemm_args *args);
LUNA_API size_t luna_gemm_scratch(const luna_gemm_args *args);

/* A batch stride for inputs: one for all. Its gradient is the sum, in order. */
#define LUNA_BATCH_SHARED (-1)


/* softmax(scale Q K^T) V per head, online: no score is stored (eq. 1; arXiv 2205.14135). q [batch, queries, heads,
   dim], k [batch, keys, heads, dim], v [batch, keys, heads, value_dim] -> out [batch, queries, heads, value_dim]. Row
   offsets give ragged batches (no padding) instead. */
typedef struct luna_attention_args {
  const float *q, *k, *v;
  float *out;
  float *log_sum_exp;                /* [rows, heads] or null; -Inf without keys. Backward needs it. */
  float *sums;                       /* [rows, heads] or null. The matrix's row sums after dropout. */
  int64_t batch, heads, queries, keys, head_dim;
  int64_t value_dim;                 /* 0 = head_dim */
  int64_t q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head;
  const int32_t *lengths;            /* [batch] real keys; others are never read; 0 gives zeros. Null: all. */
  const int32_t *query_offsets, *key_offsets; /* [batch + 1] first rows of a ragged batch's sequences, or null */
  float scale;                       /* 0 = 1/sqrt(head_dim) */
  bool causal, window;               /* as in luna_attention_config, */
  int64_t left, right;               /* also if queries and keys differ in number */
  /* The probability for element ((b heads + head) queries + i) keys + j of op `dropout_op`. */
  float dropout;
  uint64_t seed;
  uint32_t dropout_op, step;
  const float *grad_out, *grad_sums; /* backward: as out and sums (grad_sums may be null); forward's out is read too */
  float *grad_q, *grad_k, *grad_v;   /* Backward adds to these, laid out as q, k, v; any may be null. */
  const float *grad_log_sum_exp;     /* backward: as log_sum_exp, or null; not with sums or ragged offsets */
  luna_run run;
  const struct li_attention_own *own; /* null; luna.h's */
} luna_attention_args;
LUNA_API luna_status luna_softmax_attention_f32(const luna_attention_args *args);
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_softmax_attention_backward_f32(const luna_attention_args *args);
#endif
LUNA_API size_t luna_softmax_attention_scratch(const luna_attention_args *args); /* enough for both */

/* The causal product, eq. 7: out_t = (1/t) x_t sum_{j<=t} y_j^T z_j. x, y [batch, rows, heads, dim], z [batch, rows,
   heads, value_dim] -> out [batch, rows, heads, value_dim]. */
typedef struct luna_causal_args {
  const float *x, *y, *z;
  float *out;
  int64_t batch, rows, heads, dim, value_dim;
  int64_t xy_batch, xy_row, xy_head, z_batch, z_row, z_head; /* for x and y; for z and out */
  const float *grad_out;           /* backward */
  float *grad_x, *grad_y, *grad_z; /* Backward adds; any may be null. */
  int64_t horizon;                 /* Rows t > horizon use exponential means with shares 1 / horizon; 0 = none. */
  luna_run run;
} luna_causal_args;
LUNA_API luna_status luna_causal_product_f32(const luna_causal_args *args);
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_causal_product_backward_f32(const luna_causal_args *args);
#endif
LUNA_API size_t luna_causal_product_scratch(const luna_causal_args *args);

/* Causal Luna attention, as luna_causal_nested_attention: q, k, v [batch, rows, heads, head_dim], s and forget [batch,
   rows, heads, slots] -> out as q. Gradients have the same shapes. All arrays are dense. */
typedef struct luna_causal_nested_args {
  const float *q, *k, *v, *s;
  const float *forget;    /* logits of forget gates, or null: the published form */
  bool routed;            /* The memory is routed: s has the weights of luna_route, forget is [heads]. */
  float *out;
  /* Forward writes and backward reads as many floats as s has, with forget twice as many. Null: there is no
     backward. */
  float *kept;
  int64_t batch, rows, heads, head_dim, slots;
  const int32_t *lengths; /* [batch] real slots, or null: all */
  float scale;            /* 0 = 1/sqrt(head_dim) */
  luna_activation omega;  /* as in luna_causal_nested_config */
  int64_t horizon;        /* without forget, as in luna_causal_args */
  /* For a sequence in pieces, else null: batch heads slots (2 head_dim + 1) numbers, which forward reads, unless
     position is 0, and writes. There is no backward then. */
  double *state;
  int64_t position;       /* rows of the earlier pieces */
  const float *grad_out;  /* backward */
  float *grad_q, *grad_k, *grad_v, *grad_s, *grad_forget; /* Backward adds; any may be null. */
  luna_run run;
  const struct li_attention_own *own; /* null; luna.h's */
} luna_causal_nested_args;
LUNA_API luna_status luna_causal_nested_attention_f32(const luna_causal_nested_args *args);
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_causal_nested_attention_backward_f32(const luna_causal_nested_args *args);
#endif
LUNA_API size_t luna_causal_nested_attention_scratch(const luna_causal_nested_args *args); /* enough for both */

/* Philox4x32-10 (Salmon et al. 2011) is the source of every random number here. */
LUNA_API void luna_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]);


/* ----------------
   >>trace: a function of yours sees each op, forward and backward, with its time.

       static void show(void *user, const luna_trace_event *e) {
         if (e->kind == LUNA_TRACE_BACKWARD) printf("%s: %g s\n", e->name, e->seconds);
       }

       luna_trace(ctx, show, NULL);
       ... some steps ...
       luna_trace(ctx, NULL, NULL);

   The function may be set, replaced and unset at any time, even within a scope and between forward and backward. It is
   called in order, by the thread that called luna.h, and changes no bit of any result. Without it an op costs one
   comparison. On a device each op then waits for the previous one, and a luna_graph's step is never a single launch.
   The function may call luna_trace and luna_seconds with the context, nothing else. An event is valid until the
   function returns, names and scopes until luna_close. Streams send no events. examples/luna_profile.h makes a table or
   a timeline of the events.
   ---------------- */
typedef enum luna_trace_kind {
  LUNA_TRACE_BEGIN = 0, /* luna_begin_step and luna_begin_inference end all scopes. */
  LUNA_TRACE_SCOPE_BEGIN, LUNA_TRACE_SCOPE_END, /* A scope that is ended several times ends at the first. */
  LUNA_TRACE_FORWARD, LUNA_TRACE_BACKWARD, /* An op ran. What backward recomputes is another forward. */
  LUNA_TRACE_OPTIMIZER /* An optimiser computed its norm, or updated. */
} luna_trace_kind;
/* A path of scopes, without those that began while no function was set. A context holds 128 paths. Further scopes send
   no events, and their ops belong to the scope around them. */
typedef struct luna_trace_scope {
  const char *name;    /* the function's, without "luna_" */
  const struct luna_trace_scope *outer; /* the scope around it, or null */
  double start;        /* when it last began */
} luna_trace_scope;
typedef struct luna_trace_event {
  luna_trace_kind kind;
  const char *name;
  const luna_trace_scope *scope; /* the event's scope, or that of the op's forward; or null */
  double start, seconds;   /* by luna_seconds */
  double bytes;            /* what an op or optimiser must read and write, once */
  double flops;            /* of an op's products; backward's are twice forward's */
  luna_tensor *const *in;  /* an op's inputs, for their shapes; some may be null */
  luna_tensor *const *out; /* its results */
  int inputs, outputs;     /* counts; 0 for other events */
} luna_trace_event;

typedef void (*luna_tracer)(void *user, const luna_trace_event *event);
/* Sets the function to call, or null for none. A context's first one takes 3 KB until luna_close. */
LUNA_API luna_status luna_trace(luna_ctx *ctx, luna_tracer function, void *user);
/* Waits for the context's device and returns the time in seconds, from any origin; 0 if the machine has no clock. */
LUNA_API double luna_seconds(luna_ctx *ctx);
#endif /* LUNA_H */

/* ========================================
   2. Implementation
   ======================================== */
#if (defined(LUNA_IMPLEMENTATION) || defined(LUNA_BACKEND)) && !defined(LI_BACKEND_H)
#define LI_BACKEND_H
/* ----------------
   >>backend: the table of functions that a device implements
   An entry runs one kind of op: it gets the op with its tensors (pointer, dtype, device, shape; contiguous) and returns
   a status. It takes and returns no host value that changes between steps: those are in luna_step_state, in backend
   memory. Entries of tier 2 may be null: the op is then composed from tier 1.
   A file without the implementation sees this chapter if it defines LUNA_BACKEND before it includes luna.h. It is not
   frozen: ops, entries and structs may change with any version of luna.h, and luna_open takes no backend that was
   compiled with another.
   ---------------- */
/* Maps of single numbers. M(NAME, name, value, slope) is LUNA_ACTIVATION_NAME and luna_name, with its value at x and
   its derivative there, which may use the value y. Both use the kernels' vector functions (>>vector). */
#define LUNA_ACTIVATIONS(M) \
  M(RELU, relu, vf_max(vf_zero(), x), vf_select(vf_gt(x, vf_zero()), vf_of(1), vf_max(vf_zero(), x))) \
  M(GELU, gelu, vf_mul(x, vf_normal_cdf(x)), \
    vf_fma(vf_mul(x, vf_of(0.39894228040143267794)), vf_half_gauss(x), vf_normal_cdf(x))) \
  M(ELU1, elu1, vf_select(vf_gt(x, vf_zero()), vf_add(x, vf_of(1)), vf_exp(x)), \
    vf_select(vf_gt(x, vf_zero()), vf_of(1), vf_exp(x))) \
  M(SOFTPLUS, softplus, vf_add(vf_max(vf_zero(), x), vf_log1p(vf_exp(vf_neg(vf_abs(x))))), \
    vf_div(vf_of(1), vf_add(vf_of(1), vf_exp(vf_neg(x))))) \
  M(SOFTPLUS2, softplus2, \
    vf_fma(vf_log1p(vf_exp2(vf_neg(vf_abs(x)))), vf_of(1.44269504088896340736), vf_max(vf_zero(), x)), \
    vf_div(vf_of(1), vf_add(vf_of(1), vf_exp2(vf_neg(x))))) \
  M(SIGMOID, sigmoid, vf_div(vf_of(1), vf_add(vf_of(1), vf_exp(vf_neg(x)))), vf_fnma(y, y, y)) \
  M(SILU, silu, vf_div(x, vf_add(vf_of(1), vf_exp(vf_neg(x)))), \
    vf_div(vf_add(vf_of(1), vf_div(x, vf_add(vf_of(1), vf_exp(x)))), vf_add(vf_of(1), vf_exp(vf_neg(x))))) \
  M(TANH, tanh, vf_tanh(x), vf_fnma(y, y, vf_of(1))) \
  M(LEAKY_RELU, leaky_relu, vf_select(vf_gt(x, vf_zero()), x, vf_mul(x, vf_of(0.01))), \
    vf_select(vf_gt(x, vf_zero()), vf_of(1), vf_select(vf_le(x, vf_zero()), vf_of(0.01), x)))
#define LUNA_MAPS(M) \
  LUNA_ACTIVATIONS(M) \
  M(EXP, exp, vf_exp(x), y) \
  M(LOG, log, vf_select(vf_lt(x, vf_zero()), vf_sqrt(x), vf_log(x)), vf_div(vf_of(1), x)) \
  M(SQRT, sqrt, vf_sqrt(x), vf_div(vf_of(0.5), y)) \
  M(RSQRT, rsqrt, vf_div(vf_of(1), vf_sqrt(x)), vf_div(vf_mul(vf_of(-0.5), y), x)) \
  M(ABS, abs, vf_abs(x), vf_select(vf_gt(x, vf_zero()), vf_of(1), vf_select(vf_lt(x, vf_zero()), vf_of(-1), x)))
#define LUNA_READS_IN(i) (1 << (i))
#define LUNA_READS_INS(count) ((1 << (count)) - 1) /* the first inputs */
#define LUNA_READS_OUT(i) (256 << (i))
/* Ops that compute each result from one number of each input, with broadcasting: E(name, tier, reads, cheap, function,
   differentiable inputs, value, and its gradient for each input). a, b and c are the inputs and g the result's
   gradient; the kernels' vector functions compute them (>>vector). */
#define LUNA_BINARIES(E) \
  E(ADD, 1, 0, true, add, 3, vf_add(a, b), g, g, g) \
  E(SUB, 1, 0, true, sub, 3, vf_sub(a, b), g, vf_neg(g), g) \
  E(MUL, 1, LUNA_READS_INS(2), false, mul, 3, vf_mul(a, b), vf_mul(g, b), vf_mul(g, a), g) \
  E(DIV, 1, LUNA_READS_INS(2), false, div, 3, vf_div(a, b), vf_div(g, b), \
    vf_neg(vf_mul(vf_div(g, b), vf_div(a, b))), g) \
  E(MINIMUM, 1, LUNA_READS_INS(2), false, minimum, 3, \
    vf_select(vf_le(a, b), a, vf_select(vf_lt(b, a), b, vf_add(a, b))), vf_select(vf_lt(b, a), vf_zero(), g), \
    vf_select(vf_lt(b, a), g, vf_zero()), g) \
  E(MAXIMUM, 1, LUNA_READS_INS(2), false, maximum, 3, \
    vf_select(vf_le(b, a), a, vf_select(vf_lt(a, b), b, vf_add(a, b))), vf_select(vf_lt(a, b), vf_zero(), g), \
    vf_select(vf_lt(a, b), g, vf_zero()), g) \
  E(LESS, 1, 0, false, less, 0, vf_select(vf_lt(a, b), vf_of(1), vf_zero()), g, g, g) \
  E(LESS_EQUAL, 1, 0, false, less_equal, 0, vf_select(vf_le(a, b), vf_of(1), vf_zero()), g, g, g) \
  E(EQUAL, 1, 0, false, equal, 0, \
    vf_select(vf_le(a, b), vf_select(vf_le(b, a), vf_of(1), vf_zero()), vf_zero()), g, g, g) \
  E(NOT_EQUAL, 1, 0, false, not_equal, 0, \
    vf_select(vf_le(a, b), vf_select(vf_le(b, a), vf_zero(), vf_of(1)), vf_of(1)), g, g, g)
#define LUNA_ELEMENTWISE(E) \
  LUNA_BINARIES(E) \
  E(WHERE, 1, LUNA_READS_IN(0), false, where, 6, vf_select(vf_le(vf_abs(a), vf_zero()), c, b), g, \
    vf_select(vf_le(vf_abs(a), vf_zero()), vf_zero(), g), vf_select(vf_le(vf_abs(a), vf_zero()), g, vf_zero())) \
  E(CLAMP, 1, LUNA_READS_IN(0), false, clamp, 1, vf_select(vf_lt(a, b), b, vf_select(vf_lt(c, a), c, a)), \
    vf_select(vf_lt(a, b), vf_zero(), vf_select(vf_lt(c, a), vf_zero(), g)), g, g)
/* R(name, tier, reads, cheap), and E of LUNA_ELEMENTWISE. reads: the inputs and results whose data backward reads;
   parameters are always there. cheap: backward reads no result, and forward is so fast that a result which backward
   needs elsewhere is recomputed instead of kept. */
#define LUNA_OPS(R, E) \
  R(PERMUTE, 1, 0, false) \
  R(SLICE, 1, 0, false) \
  R(CONCAT, 1, 0, false) \
  R(EXPAND, 1, 0, false) \
  LUNA_ELEMENTWISE(E) \
  R(SCALE, 1, 0, true) \
  R(REDUCE, 1, 0, false) \
  R(MAX, 1, LUNA_READS_IN(0), false) \
  R(MATMUL, 1, LUNA_READS_INS(2), false) \
  R(LINEAR, 1, LUNA_READS_INS(2), false) \
  R(ACTIVATION, 1, LUNA_READS_IN(0), true) \
  R(SOFTMAX, 1, LUNA_READS_OUT(0), false) \
  R(LOG_SOFTMAX, 2, LUNA_READS_OUT(0), false) \
  R(MASK, 1, 0, true) \
  R(RATIO, 1, LUNA_READS_IN(0) | LUNA_READS_OUT(0), false) \
  R(DROPOUT, 1, 0, true) \
  R(LAYER_NORM, 1, LUNA_READS_INS(2), true) \
  R(EMBEDDING, 1, 0, true) \
  R(SINUSOIDS, 1, 0, true) \
  R(ROTARY, 1, 0, false) \
  R(CROSS_ENTROPY, 1, LUNA_READS_IN(0), false) \
  R(SOFTMAX_ATTENTION, 1, LUNA_READS_INS(3) | LUNA_READS_OUT(0) | LUNA_READS_OUT(1), false) \
  R(CAUSAL_PRODUCT, 1, LUNA_READS_INS(3), false) \
  R(ROUTE, 1, LUNA_READS_INS(2) | LUNA_READS_OUT(0), false) \
  R(SHORT_CONVOLUTION, 1, LUNA_READS_INS(2), false) \
  R(CUSTOM, 1, 0xffff, false) \
  R(UNPACK, 2, LUNA_READS_INS(4), false) \
  R(CAUSAL_LUNA, 2, LUNA_READS_INS(4), false) \
  R(FORGETTING_LUNA, 1, LUNA_READS_INS(5), false) \
  R(FEED_FORWARD, 2, LUNA_READS_INS(4), false) \
  R(LINEAR_CROSS_ENTROPY, 2, LUNA_READS_INS(3), false)
typedef enum luna_op_kind {
#define LI_OP_KIND(name, tier, reads, cheap) LUNA_OP_##name,
#define LI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) LUNA_OP_##name,
  LUNA_OPS(LI_OP_KIND, LI_OP_EACH)
#undef LI_OP_EACH
#undef LI_OP_KIND
  LUNA_OP_COUNT
} luna_op_kind;

/* In a forgetting memory, scores are limited to this distance from 0, and weights have this common factor. */
#define LUNA_FORGET_SCORE 15
#define LUNA_FORGET_SCALE 1.2664165549094176e-14 /* e^-32 keeps e^-15 .. e^(15 + LI_CHUNK) in range. */
/* In a routed memory, a slot is empty while the log of its weight, with that factor, is below this: 1e-12. */
#define LUNA_ROUTE_EMPTY (-59.63102111592855f)
typedef struct luna_op {
  luna_op_kind kind;
  int inputs, outputs;
  luna_tensor *in[LUNA_MAX_INPUTS]; /* null for absent optional inputs */
  luna_tensor *out[2];
  const int32_t *index;             /* tokens or labels (backend memory) */
  const int32_t *lengths, *query_offsets, *key_offsets;
  union {                           /* the arguments of its kind, if any */
    struct { int64_t axes[LUNA_MAX_RANK]; } permute;
    struct { int64_t axis, start; } slice;
    struct { int64_t axis; } concat;
    struct { int64_t count; } expand;
    struct {                        /* LUNA_ELEMENTWISE: the result as [shape], with axes joined if possible; */
      int64_t shape[LUNA_MAX_RANK], stride[3][LUNA_MAX_RANK]; /* each input's strides in it, 0 if it repeats; */
      float scalar[3];              /* replaces an input that is null */
      int input;                    /* Backward computes this input's gradient. */
    } elementwise;
    struct { float factor; } scale;
    struct {                        /* reduce, max: [outer, axis, inner]; factor 1, or 1/axis for the mean */
      int64_t outer, axis, inner;
      float factor;
    } reduce;
    struct { bool rms; float epsilon; } norm;
    struct { int64_t first; } sinusoids; /* the first row's position */
    struct { int64_t heads, first; float base; } rotary;
    struct { int64_t width; } mask; /* floats a row */
    /* a: outer * inner matrices, b: inner */
    struct { int64_t outer, inner, m, n, k; bool transpose_a, transpose_b; } matmul;
    struct { bool recompute; } feed_forward;
    /* Also for linear cross-entropy: factor 1, or 1 / labels that count. */
    struct { float smoothing, factor; } cross_entropy;
    struct {
      int64_t heads, batch, queries, keys;
      float scale;
      bool causal, window;    /* window: left, right */
      int64_t left, right;
      bool scores;            /* The second result is the log-sum-exp, not the row sums. */
    } attention;              /* softmax attention, pack */
    struct { int64_t heads, horizon; float scale; } causal; /* causal product, causal Luna; horizon 0: none */
    luna_custom custom;
  } arg;
  float dropout;              /* 0 outside training */
  uint32_t dropout_op;        /* this op's number among the step's that drop */
  float last_dropout;         /* A second drop, of the result before a residual is added, */
  uint32_t last_dropout_op;   /* has its own number. */
  luna_activation activation; /* 0 = none */
  bool training;              /* Backward needs this op: it is on the tape. */
  bool dots;                  /* A stream's single rows use the decoding kernels. */
  int sets;                   /* backward: bits of inputs whose gradient is set, not added to */
  /* Streaming: the state of CAUSAL_LUNA and SHORT_CONVOLUTION after the earlier rows, which forward reads and updates;
     else null. */
  /* Means of k^T A [batch, heads, head_dim, slots] and of A^T v [batch, heads, slots, head_dim] over `position` rows,
     then FORGETTING_LUNA's weights of them [batch, heads, slots]. */
  double *state;
  /* 0, or the offset in doubles from the above to a state before the rows, which training carries. */
  ptrdiff_t before;
  /* In backend memory, for all sequences or, with `before`, [batch]. If it is 0, the means are 0 and not read. */
  const int64_t *position;
  float *history;          /* [batch, width - 1, d]: the convolution's last inputs */
  void *kept;              /* kept_size bytes, from forward to backward */
  void *workspace;         /* during one call */
  size_t kept_size, workspace_size, backward_workspace_size;
  luna_ctx *ctx;
  struct li_op_state *own; /* luna.h's */
} luna_op;

/* What an op's functions can do (luna_op_functions.can). If inputs are the same tensor, only ADDS_IN_PLACE matters. */
#define LUNA_SETS_GRAD(i) (1 << (i))         /* Backward sets in[i]'s gradient if luna_op.sets has bit i. */
/* Backward can make in[i]'s gradient in the place of out[0]'s. For an input that is only added they are equal. */
#define LUNA_GRAD_IN_PLACE(i) (256 << (i))
/* in[i] may be the same tensor as that input: its part is added there, and not read again. */
#define LUNA_ADDS_IN_PLACE(i) (65536 << (i))
#define LUNA_FORWARD_IN_PLACE (1 << 24)      /* Forward may write the result over in[0]. */
/* of LUNA_ELEMENTWISE; 256 is LUNA_GRAD_IN_PLACE(0) */
#define LUNA_EACH_IN_PLACE(cheap) ((cheap) ? 256 | LUNA_FORWARD_IN_PLACE : 0)

typedef struct luna_op_functions {
  void (*query)(luna_op *op); /* sets kept_size, workspace_size, backward_workspace_size */
  luna_status (*forward)(luna_op *op);
  luna_status (*backward)(luna_op *op); /* adds to in[i]->grad, or sets it, unless null, from out[]->grad */
  int can; /* 0, or bits of the above */
} luna_op_functions;

typedef struct luna_step_state { /* Backend memory holds what changes between steps. */
  uint64_t seed;
  uint64_t step;           /* begin_step calls; Philox's last counter word */
  /* Optimiser steps made, and skipped for a NaN or Inf. The context's own state counts all its optimisers. */
  uint64_t updates, skipped;
  float lr, factor, norm;  /* this step's learning rate, clip factor, gradient norm */
  int nonfinite;
  uint64_t skipped_in_row; /* an optimiser's: up to its last step */
} luna_step_state;

typedef enum luna_optimizer_kind {
  LUNA_OPTIMIZER_SGD = 0, LUNA_OPTIMIZER_ADAM, LUNA_OPTIMIZER_ADAMW, LUNA_OPTIMIZER_HOOK
} luna_optimizer_kind;
/* One optimiser step for many parameters: the rule for all, and each one's part. The table of all parts cuts parameters
   into numbered pieces of LUNA_UPDATE_PIECE elements. */
#define LUNA_UPDATE_PIECE 16384
typedef struct luna_rule { /* reads and writes the state */
  luna_optimizer_kind kind;
  bool nesterov;
  float momentum, beta1, beta2, epsilon, clip, average;
  float largest; /* A larger norm after clipping, or NaN, counts as not finite. */
  luna_step_state *state;
  const struct luna_optimizer_hook *hook; /* in host memory, as is the config; only for LUNA_OPTIMIZER_HOOK */
  const struct luna_optimizer_config *config;
} luna_rule;
typedef struct luna_update {
  float *value, *grad;
  float *moment[3];     /* SGD: momentum; Adam: gradient and its square; or a hook's; or null */
  float *average;       /* or null; moves by (1 - a) / (1 - a^updates) of the difference, with the rule's a */
  int64_t count, first; /* elements; the first piece's number */
  float decay, lr;      /* lr: a factor on the state's */
} luna_update;

struct luna_backend {
  uint32_t version; /* 1 */
  uint32_t size; /* sizeof(luna_backend) */
  int device;
  size_t opened; /* `open` takes this many device bytes, for luna_memory. */
  /* Cost of a flop of products by parameters, relative to one in attention, for luna_form; 0 = 1. */
  float product_cost;
  /* Opens what one context needs on the device; null: nothing. If it fails (luna_fail gives the reason), the context
     exists and every call in it fails with that sentence. */
  luna_status (*open)(luna_ctx *ctx, int device, void **self);
  void (*close)(void *self);
  /* Allocates memory that the host cannot read, aligned to 256 bytes. Null: the context's allocator is used. */
  void *(*allocate)(void *self, size_t bytes);
  void (*release)(void *self, void *pointer, size_t bytes);
  /* direction: 0 within (never overlapping), 1 to the device, 2 to the host. */
  luna_status (*copy)(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction);
  luna_status (*zero)(luna_ctx *ctx, void *at, size_t bytes);
  /* On one device: what ctx queues from now on runs after what `other` has queued. Null: work is done when a call
     returns. */
  luna_status (*wait)(luna_ctx *ctx, const luna_ctx *other);
  /* Counts a training step; `stepped` clears nonfinite. The last step's data in host memory are still valid. */
  luna_status (*begin)(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped);
  /* Sets nonfinite if the loss is not finite. */
  luna_status (*check)(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state);
  /* These take `count` parts, in host memory and in backend memory. norm sets norm, factor and nonfinite; update
     updates. */
  luna_status (*norm)(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table,
                      int64_t count);
  luna_status (*update)(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table,
                        int64_t count);
  /* Tells whether `update` runs this hook. Null on a device: it runs none. */
  bool (*knows)(const struct luna_optimizer_hook *hook);
  /* A stream's step of single tokens begins or ends. The calls between repeat those of the previous step, in the same
     memory, and may run at the end. The device keeps its data in *kept, at first null, until forget. Null: calls run
     one by one. */
  void (*token)(luna_ctx *ctx, void **kept, bool ends);
  void (*forget)(void *self, void *kept);
  luna_op_functions op[LUNA_OP_COUNT];
};
/* Returns a kind's name as in LUNA_OPS, which stays valid. */
LUNA_API const char *luna_op_name(luna_op_kind kind);
/* Return what the `open` of a context's table made, and the context's state: seed, step, nonfinite. */
LUNA_API void *luna_backend_self(const luna_ctx *ctx);
LUNA_API luna_step_state *luna_backend_state(const luna_ctx *ctx);
#endif /* LI_BACKEND_H */

#if (defined(LUNA_IMPLEMENTATION) && !defined(LI_IMPLEMENTED)) || defined(LI_PASS)

#ifndef LI_PASS
/* >>base: what all later chapters share: switches, sizes, li_each for threads, structs that describe work to kernels
   (li_matrix, li_gemm and others), and the lists of kernels. A new kernel needs a line in LI_KERNELS or LI_LOOPS, and
   in its chapter a reference and a loop that every instruction set compiles. */

#ifdef __FAST_MATH__
#error "luna.h promises exact results for NaN, Inf and rounding: compile without -ffast-math"
#endif
#include <float.h>
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16 /* 16 widens only _Float16. */
#error "luna.h promises float32 rounding: compile with -msse2 -mfpmath=sse (32-bit x86) or -fexcess-precision=fast"
#endif
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#pragma warning(push)
#pragma warning(disable : 4996) /* Under /sdl, fopen is an error. */
#endif
#if defined(__cplusplus) && defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif

#include <math.h>
#include <string.h>

#pragma push_macro("LI_FN")
#pragma push_macro("LUNA_API")
#undef LUNA_API
#define LUNA_API

/* Visual C++ accepts every intrinsic without a target attribute, and has its own atomics and CPUID. It has never
   compiled this branch; tests/tools/cross.sh builds it for Windows with gcc and this macro. */
#if defined(_MSC_VER) && !defined(__clang__) && !defined(LI_MSVC)
#define LI_MSVC
#endif
#if defined(__GNUC__) || defined(__clang__)
#define LI_UNUSED __attribute__((unused))
#if !defined(__OPTIMIZE__) || defined(__OPTIMIZE_SIZE__)
#define LI_HOT static __attribute__((unused))
#define LI_RARE
#else
#define LI_HOT static __attribute__((hot, unused))
#ifdef __clang__
#define LI_RARE __attribute__((cold)) /* Compiled for size */
#else /* This also omits the passes that take gcc longest and gain little here. */
#define LI_RARE \
  __attribute__((cold, optimize("no-expensive-optimizations", "no-gcse", "no-ivopts", "no-schedule-insns2", \
                                "no-tree-dominator-opts", "no-tree-pre", "no-tree-pta", "no-tree-vrp")))
#endif
#endif
#define LI_CALL LI_HOT __attribute__((noinline)) /* Used everywhere */
#if defined(__OPTIMIZE__) && !(defined(__OPTIMIZE_SIZE__) && defined(LUNA_NO_SIMD))
#define LI_INLINE static inline __attribute__((always_inline, unused))
#else
/* Calls make the code smaller, or cut compile time to a third. */
#define LI_INLINE static inline __attribute__((unused))
#endif
#else
#define LI_UNUSED
#define LI_HOT static
#define LI_RARE
#define LI_CALL static
#ifdef LI_MSVC
#define LI_INLINE static __forceinline
#else
#define LI_INLINE static inline
#endif
#endif

#ifdef LI_DOUBLE /* Then float means double. */
#undef LUNA_NO_INT8
#define LUNA_NO_INT8
#undef LUNA_NO_BF16
#define LUNA_NO_BF16
#endif

#define LI_ALIGN 64 /* Every allocation and every part of scratch is aligned to this. */
#define LI_HOOK_NAME 64 /* A hook's name has fewer bytes. */
#define LI_KEY_BLOCK 512 /* An attention block holds this many keys. Partial results merge in block order. */
#define LI_TILE 64 /* An attention tile has this many queries. LI_KEY_BLOCK is a multiple. */
#define LI_CHUNK 64 /* Rows of a causal chunk */
#define LI_KC 512 /* Terms per gemm block */
#define LI_KA (LI_KC + 16) /* The row stride of gathered A is no power of two, so that rows do not share cache sets. */
#define LI_FLOAT_ROWS 64 /* This many rows are summed in float, then in double. */
#define LI_NC 512 /* Columns of B per block */
#define LI_TILES_ABREAST 8 /* Tiles of column-major A per gather */
#define LI_WORDS_ABREAST 4 /* The same, rounded to bfloat16 */
#define LI_SUM_ROWS 256 /* This many rows of C at a time have their partial sums in scratch. */
#define LI_MAX_THREADS 256
#define LI_NORM_EPSILON 1e-5f /* Layer norm's, the authors' */
LI_INLINE bool li_is_omega(int kind) { return kind >= LUNA_ACTIVATION_ELU1 && kind <= LUNA_ACTIVATION_SOFTPLUS2; }

LI_INLINE int64_t li_min(int64_t a, int64_t b) { return a < b ? a : b; }
LI_INLINE int64_t li_max(int64_t a, int64_t b) { return a > b ? a : b; }
LI_INLINE int64_t li_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
LI_INLINE size_t li_round(size_t bytes) { return (bytes + (LI_ALIGN - 1)) & ~(size_t)(LI_ALIGN - 1); }

LI_INLINE uint32_t li_bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
LI_INLINE float li_float_of(uint32_t bits) {
  float x = 0;
  memcpy(&x, &bits, sizeof bits);
  return x;
}
/* Rounds x, which must not be NaN, to its upper 16 bits: to nearest, ties to even. */
LI_INLINE float li_upper(float x) {
  const uint32_t bits = li_bits_of(x);
  return li_float_of((bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000u);
}
LI_INLINE bool li_is_finite(float x) { return x - x == 0; }
LI_FN bool li_are_finite(int64_t n, const float *x) {
  float sum[4] = { 0, 0, 0, 0 }; /* 0, or NaN */
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int j = 0; j < 4; j++) sum[j] += x[i + j] - x[i + j];
  for (; i < n; i++) sum[0] += x[i] - x[i];
  return sum[0] + sum[1] + sum[2] + sum[3] == 0;
}
/* Ops and kernels have no defaults: 0 means no activation. */
#define LI_NO_ACTIVATION LUNA_ACTIVATION_DEFAULT
LI_INLINE luna_activation li_activation_or(luna_activation a, luna_activation fallback) {
  if (a == LUNA_ACTIVATION_DEFAULT) return fallback;
  if (a == LUNA_ACTIVATION_NONE) return LI_NO_ACTIVATION;
  return a;
}
LI_INLINE bool li_is_activation(luna_activation a) { return (unsigned)a <= LUNA_ACTIVATION_NONE; }

/* These limit the elements of an array, so that bytes and sums never wrap, and of a matrix in a thread's scratch. */
#define LI_MAX_COUNT ((int64_t)1 << (sizeof(size_t) < 8 ? 28 : 47))
#define LI_MAX_SCRATCH ((int64_t)1 << (sizeof(size_t) < 8 ? 24 : 38))
/* Returns a * b for sizes; -1 when either is negative or the product passes the limit. */
LI_FN int64_t li_product(int64_t a, int64_t b, int64_t limit) {
  if ((((uint64_t)a | (uint64_t)b) >> 31) == 0) return a * b > limit ? -1 : a * b; /* This case needs no division. */
  if (a < 0 || b < 0) return -1;
  if (a == 0 || b == 0) return 0;
  if (a > limit / b) return -1;
  return a * b;
}
LI_FN int64_t li_checked(int64_t a, int64_t b) { return li_product(a, b, LI_MAX_COUNT); }
LI_FN int64_t li_size(int64_t size) { return size < 0 || size > LI_MAX_COUNT ? -1 : size; }

/* Hides the value of x from the optimiser from here on. */
#if defined(__GNUC__)
#define LI_HIDE(x) __asm__("" : "+r"(x))
#else
#define LI_HIDE(x) ((void)0)
#endif
/* Zeroes a struct by a call of memset. The code that compilers inline for it takes several times as long. */
LI_CALL void li_clear(void *at, size_t bytes) {
  LI_HIDE(bytes); /* For the sizes used here gcc would inline rep stos. */
  memset(at, 0, bytes);
}

LI_INLINE size_t li_bytes(int64_t floats) { return (size_t)floats * sizeof(float); }
/* Pointers may be null for 0 bytes. */
LI_INLINE void li_copy(void *to, const void *from, size_t bytes) { if (bytes) memcpy(to, from, bytes); }

#define LI_LENGTH(table) ((int)(sizeof(table) / sizeof((table)[0])))

/* Return null for null, which means "not wanted" or "only count the memory". */
LI_INLINE float *li_offset(float *at, int64_t floats) { return at ? at + floats : NULL; }
LI_INLINE const float *li_from(const float *at, int64_t floats) { return at ? at + floats : NULL; }

/* Takes the next `count` floats of scratch, aligned. From a null pointer the same calls compute the size. */
LI_INLINE float *li_take(char **scratch, int64_t count) {
  char *at = *scratch;
  *scratch = at + li_round(li_bytes(count));
  return (float *)(void *)at;
}
LI_INLINE int64_t li_floats(int64_t count) { return (int64_t)li_round(li_bytes(count)); }

/* Moves the last `past` rows of history followed by x [rows, d] into history, if they are finite. */
LI_FN void li_history_move(float *history, int64_t past, const float *x, int64_t rows, int64_t d) {
  const int64_t newer = past < rows ? past : rows;
  if (!li_are_finite(newer * d, x + (rows - newer) * d)) return;
  for (int64_t i = 0; i < past; i++)
    memcpy(history + i * d, i + rows < past ? history + (i + rows) * d : x + (i + rows - past) * d, li_bytes(d));
}

/* All work is shared among threads by li_each(parallel, pieces, task, work). A task does pieces [first, last). The
   thread's number selects its part of the scratch, which keeps its contents between pieces. Which thread does a piece
   never changes a bit of the result. */
typedef void (*li_task)(void *work, int64_t thread, int64_t first, int64_t last);
typedef struct li_parallel { luna_parallel_for run; void *user; int64_t threads; } li_parallel;
LI_INLINE int64_t li_threads(const li_parallel *parallel) {
  if (parallel && parallel->run && parallel->threads > 1) return parallel->threads;
  return 1;
}
/* Returns the start of share `share` when `count` items are split evenly. */
LI_INLINE int64_t li_share(int64_t count, int64_t share, int64_t shares) {
  if (shares == 1) return count * share;
  return count / shares * share + count % shares * share / shares;
}
/* Returns the start of part `part` of n lines, a multiple of `unit`. */
LI_INLINE int64_t li_part_at(int64_t n, int64_t unit, int64_t part, int64_t parts) {
  if (parts == 1) return part * n;
  return li_min(n, li_share(li_divide_up(n, unit), part, parts) * unit);
}
/* Items are dealt to parts in turn. Tells whether one of the parts [first, last) has `item`. */
LI_INLINE bool li_dealt(int64_t item, int64_t parts, int64_t first, int64_t last) {
  return item % parts >= first && item % parts < last;
}

#define LI_GROUPS 4 /* Groups per thread */
#define LI_SHARES 16 /* With more threads, several threads use one share. */
typedef struct li_call {
  li_task task;
  void *work;
  int64_t pieces, groups, threads;
  uint32_t taken[LI_SHARES]; /* Groups taken per share */
} li_call;

/* Returns a thread's next group, or `groups` if none is left. `passed` counts the shares that it found used up, and
   starts at 0. A thread first takes the groups of its own share, in order: its caches hold the rows that it wrote in
   the op before. Then it takes groups that no thread has begun, so a thread that the system has stopped delays one
   group, not a share. Without atomics it takes every `threads`-th group. */
LI_INLINE int64_t li_next_group(li_call *c, int64_t thread, int64_t *passed) {
#if (defined(__GNUC__) || defined(__clang__)) && !defined(LUNA_NO_THREADS) && \
    (defined(_WIN32) || defined(__unix__) || defined(__APPLE__))
  const int64_t shares = li_min(c->threads, LI_SHARES);
  for (; *passed < shares; ++*passed) {
    const int64_t share = (thread * shares / c->threads + *passed) % shares;
    const int64_t group = li_share(c->groups, share, shares) +
                          (int64_t)__atomic_fetch_add(&c->taken[share], 1, __ATOMIC_RELAXED);
    if (group < li_share(c->groups, share + 1, shares)) return group;
  }
  return c->groups;
#else
  return li_min(c->groups, thread + c->threads * (*passed)++);
#endif
}
LI_FN void li_call_thread(void *user, int64_t thread) {
  li_call *c = (li_call *)user;
  int64_t passed = 0, group;
  while ((group = li_next_group(c, thread, &passed)) < c->groups)
    c->task(c->work, thread, li_share(c->pieces, group, c->groups), li_share(c->pieces, group + 1, c->groups));
}
LI_FN void li_each(const li_parallel *parallel, int64_t pieces, li_task task, void *work) {
  const int64_t threads = li_min(pieces, li_threads(parallel));
  if (threads > 1) {
    li_call call = { task, work, pieces, li_min(pieces, LI_GROUPS * threads), threads, { 0 } };
    parallel->run(parallel->user, threads, li_call_thread, &call);
  } else if (pieces > 0) {
    task(work, 0, 0, pieces);
  }
}

/* This is luna_dropout's rule for op number `op`: threshold = round(65536 p), keep = 1/(1-p). A threshold of 0 means no
   dropout. */
typedef struct li_dropout {
  uint64_t seed;
  uint32_t op, step, threshold;
  float keep;
  uint64_t first; /* Offset of e in a whole */
} li_dropout;
LI_FN uint32_t li_dropout_threshold(float probability) { return (uint32_t)((double)probability * 65536.0 + 0.5); }
LI_FN li_dropout li_dropout_of(float probability, uint64_t seed, uint32_t op, uint32_t step) {
  const li_dropout d = { seed, op, step, li_dropout_threshold(probability), 1.0f / (1.0f - probability), 0 };
  return d;
}

/* Element (i, j) of this read-only matrix is at[i * row + j * column]. */
typedef struct li_matrix { const float *at; int64_t rows, columns, row, column; } li_matrix;
LI_INLINE li_matrix li_strided(const float *at, int64_t rows, int64_t columns, int64_t row) {
  const li_matrix a = { at, rows, columns, row, 1 };
  return a;
}
LI_INLINE li_matrix li_dense(const float *at, int64_t rows, int64_t columns) {
  return li_strided(at, rows, columns, columns);
}
LI_INLINE li_matrix li_transposed(li_matrix a) {
  const li_matrix b = { a.at, a.columns, a.rows, a.column, a.row };
  return b;
}
LI_INLINE li_matrix li_columns(li_matrix a, int64_t first, int64_t last) {
  a.at += first * a.column;
  a.columns = last - first;
  return a;
}
LI_INLINE li_matrix li_lines(li_matrix a, int64_t first, int64_t last) {
  a.at += first * a.row;
  a.rows = last - first;
  return a;
}
/* A matrix to write: rows are `row` floats apart, and `add` adds to them. */
typedef struct li_out { float *at; int64_t row; bool add; } li_out;
LI_INLINE li_out li_into(float *at, int64_t row, bool add) {
  const li_out c = { at, row, add };
  return c;
}

/* n columns of B lie in panels of nr columns: row p of panel j is at[j * step + p * row]. `words` is room for a tile's
   rows of A, or null. For li_matmul_panels a `words` that is not null means that operands are rounded to bfloat16; a
   row may then hold two values of k. */
typedef struct li_panels { const float *at; int64_t n, step, row; float *words; } li_panels;
/* M [rows, columns] is the running mean of y^T z over t tokens, or the keys or values of the forgetting memory. */
typedef struct li_mean { double *at; int64_t rows, columns, row; double t; } li_mean;
typedef enum li_mean_kind { LI_STEP_MEAN, LI_STEP_KEYS, LI_STEP_VALUES } li_mean_kind;

/* An 8-bit weight [rows, columns], row-major: element i of row r is at[r * columns + i] * scale[r]. */
typedef struct li_int8 {
  const int8_t *at;
  const float *scale;  /* [rows], finite */
  const int32_t *sums; /* [rows] sums of the integers */
  int64_t rows, columns;
  const float *from;   /* The source values, or null */
  uint64_t writes;     /* Counts earlier writes of parameters. */
} li_int8;

/* C = act(alpha A B + bias), plus C with `accumulate`, for each of batch[0] x batch[1] products. Strides are in floats
   and resolved. The columns of C and of `pre` are contiguous; `pre` gets the pre-activation in C's layout and may be
   null. */
typedef struct li_gemm {
  const float *a, *b, *bias;
  const float *b_panels;        /* make_panels makes it for several products; or null. */
  const struct li_int8 *b_int8; /* Its rows from b_first on replace b^T; A is rounded to 8 bits too (>>int8). */
  int64_t b_first;
  float *c, *pre;
  int64_t m, n, k;
  int64_t a_row, a_column, b_row, b_column, c_row;
  int64_t batch[2], a_batch[2], b_batch[2], c_batch[2];
  float alpha;
  int activation;               /* luna_activation */
  bool accumulate;
  const float *residual;        /* Is added, in C's layout, unless null. Excludes accumulate, activation, pre. */
  /* For few rows: each element is a dot product of two rows, summed by lanes. Other products give other bits. */
  bool dots;
  bool bf16;                    /* A and B are rounded to bfloat16. Excludes dots. */
  /* Only if products have word_panels. With a_words or b_words A or B is stored as words, two numbers of a row each,
     and a_row or a_column and b_row count words. Instead of C, its words are written, in rows of words_row, a multiple
     of 32 numbers. With `slope`, the words of a ReLU's result, C is 0 where they are, and each 32 rows also write their
     column sums, in rows of sums_row. */
  bool a_words, b_words;
  float *words, *sums;
  const float *slope;
  int64_t words_row, sums_row;  /* words_row is 0 without words. */
} li_gemm;

/* These are the sums so far of exp(logit - shift) and of logits, then the largest logit and the label's logit. */
typedef struct li_row_sums { double exps, logits; float shift, label; } li_row_sums;
/* Cross-entropy of `rows` rows of logits. This part holds columns [first, first + columns). Forward gets a row's parts
   in order, and the last part writes loss and lse. Backward takes them in any order. Negative labels are ignored. */
typedef struct li_cross_entropy {
  const float *logits;     /* [rows, columns], stride logits_row */
  const int32_t *labels;   /* [rows] */
  int64_t rows, classes, first, columns, logits_row, grad_row;
  float smoothing, factor; /* factor scales the gradient. */
  li_row_sums *sums;       /* [rows]. Carries sums between parts; null: one part. */
  /* [rows]. lse is each row's log-sum-exp: forward writes it unless null, backward reads it. */
  float *loss, *lse;
  float *grad;             /* [rows, columns], rows grad_row apart. May be logits. */
  bool add;                /* Adds to grad instead of setting it. */
} li_cross_entropy;
LI_FN li_cross_entropy li_cross_entropy_rows(const li_cross_entropy *all, int64_t first, int64_t last) {
  li_cross_entropy a = *all;
  a.rows = last - first;
  if (a.logits) a.logits += first * a.logits_row;
  if (a.labels) a.labels += first;
  if (a.sums) a.sums += first;
  if (a.loss) a.loss += first;
  if (a.lse) a.lse += first;
  if (a.grad) a.grad += first * a.grad_row;
  return a;
}

/* An op of LUNA_ELEMENTWISE on n elements. step is 0 for an input that repeats, else 1. */
typedef struct li_elements { int kind; int64_t n; const float *x[3]; int64_t step[3]; } li_elements;

/* A layer norm or, with rms, an RMS norm; li_layer_norm_reference has the formulas. */
typedef struct li_layer_norm {
  bool rms;
  float epsilon;
  int64_t rows, n;
  const float *x, *weight, *bias; /* [rows, n]; [n] or null */
  float *y, *mean, *rstd;      /* Forward writes mean and rstd [rows] unless null; backward reads them. */
  const float *dy;
  float *dx, *dweight, *dbias; /* Backward adds to dweight and dbias unless null. */
  bool add;                    /* Backward adds to dx; else it sets dx. */
} li_layer_norm;

/* The short convolution over time, separately for each of n channels. */
typedef struct li_convolution {
  int64_t rows, n, width;
  const float *x, *history;    /* [rows, n]; [width - 1, n], null for zeros */
  const float *weight, *bias;  /* [n, width]; [n] or null */
  float *y;
  const float *dy;
  float *dx, *dweight, *dbias; /* Backward adds. dweight and dbias may be null. */
} li_convolution;

#ifdef LUNA_NO_BF16
#define LI_HAS_BF16 false
#else
#define LI_HAS_BF16 true
#endif
#define LI_BF16(g) (LI_HAS_BF16 && (g)->bf16)
/* Attention (eq. 1), the causal product (eq. 7) and causal Luna take the public arguments with sizes, strides and scale
   resolved. A batch stride of 0 shares. q, out and the [row, head] arrays index row = b * queries + i, or
   query_offsets[b] + i if ragged. grad_k may equal grad_v. Causal Luna computes U = f(scale q, k, A) and out = f(W, A,
   v), where f is eq. 7, A = omega(s), and W the softmax of U over the slots; `kept` gets W. With forget, A = e^s, the
   means are weighted by A and the gates, and `kept` gets U and the sums of the weights. */
typedef luna_attention_args li_attention;
typedef luna_causal_args li_causal;
typedef luna_causal_nested_args li_causal_luna;
/* Calls in luna.h pass these beside the public arguments. */
typedef struct li_attention_own {
  li_dropout dropout; /* In causal Luna it drops W, and needs forget. */
  bool bf16; /* Round the products' operands */
  /* For a state that training carries: positions [batch] replace `position`, and the state before row 0 lies `before`
     doubles from `state`, to which forward writes the new one. Else null and 0. */
  const int64_t *positions;
  ptrdiff_t before;
} li_attention_own;
LI_FN li_dropout li_attention_dropout(const li_attention *a) {
  if (a->own) return a->own->dropout;
  return li_dropout_of(a->dropout, a->seed, a->dropout_op, a->step);
}
LI_FN bool li_attention_bf16(const li_attention *a) { return a->own && LI_BF16(a->own); }
LI_FN bool li_drops(const li_attention *a) { return li_dropout_threshold(a->dropout) > 0; }

/* The scores of some queries by some keys. A key's scores are contiguous, in lines of `width`, `step` apart. */
typedef struct li_tile {
  int64_t query, key, width, depth; /* The tile has width queries and depth keys. */
  int64_t step;
} li_tile;

/* Folded unpack: S = X K^T + bias, softmax over each group of l columns (one group per head), out = sum_h softmax_h V_h
   + out_bias. x [batch, rows, dim], k and v [batch, heads, slots, dim], bias [batch, heads, slots] -> out [batch, rows,
   dim_out = dim], all dense. */
typedef struct li_unpack {
  const float *x, *k, *bias, *v, *out_bias, *residual; /* [dim], [batch, rows, dim]; or null */
  float *out;
  float *lse;             /* [batch, rows, heads]. Forward writes it unless null; backward reads it. */
  int64_t batch, rows, dim, heads, slots;
  const int32_t *lengths; /* [batch] real slots; null: all */
  bool bf16;              /* Round the products' operands */
  li_dropout dropout;     /* It numbers elements ((b heads + head) rows + i) slots + j. */
  li_dropout last;        /* It drops elements of out before the residual is added. */
  const float *grad_out;
  /* Backward adds; any may be null. grad_x may be grad_out, which then receives the sum in place. */
  float *grad_x, *grad_k, *grad_bias, *grad_v, *grad_out_bias;
} li_unpack;

/* K and V of one batch row, with its real slots packed. Each thread makes its own panels. */
typedef struct li_unpack_space {
  int64_t prepared; /* The batch row of the panels, or -1 */
  int64_t slots, n; /* Real slots; heads * slots */
  float *k, *v, *bias, *score_panels, *out_panels, *slope_panels; /* out_panels holds V, or in backward K. */
  float *scores, *slopes, *mask, *product, *grad; /* grad is a panel of grad_out after dropout. */
  float *words; /* li_panels' words */
} li_unpack_space;

/* An optimiser's step on the elements of one parameter. */
typedef struct li_update {
  float *value, *grad, *moment[3], *average; /* As in luna_update */
  int64_t count;
  /* Clipping multiplies gradients by `factor`. */
  float lr, decay, momentum, beta1, beta2, epsilon, correction1, correction2, factor;
  float share;            /* The average's step, 0..1 */
  bool nesterov, coupled; /* coupled adds decay to the gradient. */
} li_update;

/* Where a block of columns is written. Partial sums over k go to `sum` (C itself where that is safe), finished ones to
   C. */
typedef struct li_target {
  float *sum, *c, *pre;
  const float *bias, *from; /* from is added, in rows of from_row; or null. */
  int64_t sum_row, c_row, from_row;
  int activation;    /* In li_gemm's order one load would read both fields and wait for two stores. */
  float alpha;
  bool finish, late; /* finish marks the last block over k, which runs the epilogue; late adds C last. */
  bool bf16;         /* A is rounded, as the panels are. */
  bool a_words;      /* Like the fields below, this is li_gemm's. */
  float *words, *sums;
  const float *slope;
  int64_t words_row, sums_row;
} li_target;

/* A tile's epilogue: c = max(lowest, alpha A B + from + bias), with contiguous columns. bias may be null. Where nothing
   is added, `from` points to -0, which changes no number, not even a zero's sign. */
#define LI_MINUS_0 -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f
static LI_UNUSED const float li_nothing[32] = { LI_MINUS_0, LI_MINUS_0, LI_MINUS_0, LI_MINUS_0 };
typedef struct li_epilogue {
  const float *bias, *from;
  float *c;
  int64_t from_row, c_row;
  float alpha, lowest;
} li_epilogue;

/* The loops of a gemm, which read lines of `pair` values of k. */
typedef struct li_products {
  int64_t pair, rows, room; /* rows are a tile's; room is for its words, in floats, or 0 for LI_KA per row. */
  void (*fill_panels)(li_matrix b, float *panels);
  void (*multiply)(li_matrix a, li_panels b, const li_target *t);
  void (*word_panels)(li_matrix b, float *panels); /* Reads a B stored as words; null: words are not kept. */
} li_products;

/* Functions of one number, from >>vector without SIMD. They give the same bits on every machine. */
LI_FN float li_exp1_scalar(float x);
LI_FN float li_log1_scalar(float x);
LI_FN float li_activation_scalar(int kind, float x);
LI_FN float li_each_scalar(int kind, float a, float b, float c);

#define LI_DROPS(a) (LI_TRAINS && (a)->own && (a)->own->dropout.threshold > 0)
#ifdef LUNA_NO_TRAIN
#define LI_TRAIN(function) NULL
#define LI_TRAINS false /* No tape, no dropout */
#else
#define LI_TRAIN(function) function
#define LI_TRAINS true
#endif

/* Every kernel of an instruction set: K(result, name, arguments), T if only training needs it, B if the reference lacks
   it too. Each pass below defines li_<name>_<isa>. LUNA_NO_TRAIN leaves null in the tables, so that nothing refers to
   those functions. */
#define LI_KERNELS(K, T, B) \
  K(void, activate, (int kind, int64_t n, const float *x, float *y)) \
  B(void, activate_grad, (int kind, int64_t n, const float *x, const float *dy, bool add, float *dx)) \
  K(void, add, (int64_t n, const float *a, const float *b, float *y)) \
  K(void, mul, (int64_t n, const float *a, const float *b, float *y)) \
  K(void, elementwise, (const li_elements *e, float *y)) \
  B(void, elementwise_slope, (const li_elements *e, int input, const float *dy, float *y, bool add)) \
  K(void, scale, (int64_t n, float factor, const float *x, float *y)) \
  K(void, scale_add, (int64_t n, float factor, const float *x, float *y)) \
  K(double, sum, (int64_t n, const float *x)) \
  T(double, sum_squares, (int64_t n, const float *x)) \
  K(float, dot, (int64_t n, const float *a, const float *b)) \
  K(void, softmax, (int64_t rows, int64_t n, const float *x, float *y)) \
  B(void, softmax_backward, (int64_t rows, int64_t n, const float *y, const float *dy, float *dx)) \
  K(void, layer_norm, (const li_layer_norm *a)) \
  B(void, layer_norm_backward, (const li_layer_norm *a)) \
  B(void, layer_norm_weights, (const li_layer_norm *a, int64_t first, int64_t last)) \
  K(void, sum_rows, (li_matrix x, float factor, float *y)) \
  K(void, cross_entropy, (const li_cross_entropy *a)) \
  B(void, cross_entropy_backward, (const li_cross_entropy *a)) \
  K(void, short_convolution, (const li_convolution *a)) \
  B(void, short_convolution_backward, (const li_convolution *a)) \
  B(void, short_convolution_weights, (const li_convolution *a, int64_t first, int64_t last)) \
  K(void, dropout, (const li_dropout *dropout, int64_t first, int64_t n, const float *x, float *y, \
                    bool accumulate)) \
  T(void, sgd, (const li_update *update)) \
  T(void, adam, (const li_update *update))
/* Inner loops that drivers call. */
#define LI_LOOPS(K, T) \
  K(void, dot_rows, (li_matrix a, li_matrix b, const li_target *t)) \
  K(void, dropout_mask, (const li_dropout *d, int64_t first, int64_t n, float *mask)) \
  K(void, tile_softmax, (const li_tile *t, float *s, const float *mask, float *stats)) \
  T(void, tile_slopes, (const li_tile *t, float *s, float *slopes, const float *mask, const float *stats)) \
  K(void, tile_hide, (int64_t lines, const li_tile *t, int64_t from, int64_t to, float value, float *x)) \
  K(void, attention_merge, (li_matrix part, const float *stats, float *state, float *out, int64_t out_row)) \
  K(void, attention_finish, (int64_t width, int64_t dim, float *state, float *out, int64_t out_row)) \
  K(void, unpack_softmax, (const li_unpack *u, const li_unpack_space *m, int64_t row, int64_t rows)) \
  T(void, unpack_slopes, (const li_unpack *u, const li_unpack_space *m, int64_t row, int64_t rows)) \
  K(void, scan, (int64_t n, double joins, double leaves, float *state, double *carried)) \
  K(bool, all_finite, (li_matrix x)) \
  K(void, copy_rows, (li_matrix x, float *y, int64_t y_row)) \
  K(void, scale_rows, (li_matrix x, const float *factors, float *y, int64_t y_row)) \
  K(void, forget_weights, (li_matrix s, li_matrix gates, float fade, float *w, float *sums)) \
  K(void, forget_totals, (li_matrix w, const float *before, float *z)) \
  K(void, route_logs, (li_matrix s, float fade, float *z, float *logs)) \
  K(void, forget_divide, (int64_t n, float factor, const float *x, const float *z, float *y)) \
  T(void, forget_slopes, (int64_t n, float scale, float own, const float *u, const float *z, const float *r, \
                          const float *dr, float *h, float *dz)) \
  T(void, forget_scores, (li_matrix s, const float *w, const float *dz, const float *after, const float *z, \
                          float scale, float *dw, float *ds, float *h)) \
  T(void, forget_gates, (li_matrix gates, bool routed, const float *dw, float *after, float *dgates)) \
  K(void, step_mean, (li_mean_kind kind, li_mean m, const double *share, const float *y, const float *z, \
                      const float *x, double *result))

typedef struct li_kernels {
  int64_t mr, nr;            /* A tile has mr rows, a panel nr columns. */
  luna_isa isa;
  const li_products *panels; /* These multiply float32; null: the reference, without loops. */
  const li_products *words;  /* These multiply bfloat16 and 8 bits; null: not in this build. */
  const struct li_int8_loops *int8;
#define LI_FIELD(result, name, arguments) result (*name) arguments;
  LI_KERNELS(LI_FIELD, LI_FIELD, LI_FIELD)
  LI_LOOPS(LI_FIELD, LI_FIELD)
#undef LI_FIELD
} li_kernels;

LI_FN void li_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p = (uint64_t)0xD2511F53u * c0, r = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(r >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)r;
    c2 = (uint32_t)(p >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}

/* Computes sin x and cos x to 1e-14 for |x| < 1e9, by Taylor polynomials of x minus a multiple of pi/2. */
LI_FN void li_sine(double x, double *sine, double *cosine) {
  const double turns = floor(x * 0.63661977236758134308 + 0.5),
      r = (x - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11, q = r * r;
  const double s = r + r * q * (-1.0 / 6 + q * (1.0 / 120 + q *
      (-1.0 / 5040 + q * (1.0 / 362880 + q * (-1.0 / 39916800 + q / 6227020800.0)))));
  const double c = 1 + q *
      (-0.5 + q * (1.0 / 24 + q * (-1.0 / 720 + q * (1.0 / 40320 + q *
                                                     (-1.0 / 3628800 + q * (1.0 / 479001600 - q / 87178291200.0))))));
  const int quarter = fabs(turns) < 9e15 ? (int)((int64_t)turns & 3) : 0; /* Larger angles carry no information. */
  *sine = quarter & 1 ? c : s;
  *cosine = quarter & 1 ? s : c;
  if (quarter & 2) *sine = -*sine;
  if (quarter == 1 || quarter == 2) *cosine = -*cosine;
}
/* Position t turns by the angles t w_i, w_i = e^(-i rate) rounded to float. Sinusoidal positions, in tensor2tensor's
   form, have sin(t w_i) in the first half and cos(t w_i) in the second, w_i = 10000^(-i / (d/2 - 1)). An odd last
   element is 0. */
LI_FN double li_frequency(int64_t i, double rate) { return (double)(float)exp(-(double)i * rate); }
LI_FN double li_sinusoid_rate(int64_t half) {
  if (half > 1) return 9.21034037197618273608 / (double)(half - 1);
  return 0;
}
#endif /* !LI_PASS */

/* ----------------
   >>kernels: each chapter has the reference, then the inner loops, then the driver
   Inner loops are compiled once per instruction set: luna.h includes itself with LI_PASS set to LI_ISA_<isa>, and
   LI_K(name) becomes li_name_<isa>. Drivers (blocking, splitting, tails) are compiled once and call the loops through a
   table. Drivers, references and all later code are compiled for size, except LI_HOT functions: loops over numbers, and
   what every op of a step runs.
   ---------------- */
#undef LI_FN
#undef LI_MATH
#ifndef LI_PASS
#define LI_FN static LI_UNUSED LI_RARE
/* The reference has no backward pass. A header of the tests adds one and defines LI_BACKWARD_REFERENCE. */
#ifdef LI_BACKWARD_REFERENCE
LI_FN void li_attention_backward_reference(const li_attention *a);
LI_FN void li_unpack_backward_reference(const li_unpack *u, void *scratch);
LI_FN void li_causal_backward_reference(const li_causal *c);
LI_FN void li_causal_luna_backward_reference(const li_causal_luna *a, void *scratch);
LI_FN size_t li_causal_luna_backward_scratch_reference(const li_causal_luna *a);
#define LI_REFERENCE_TRAINS true
#define LI_BY_BACKWARD_REFERENCE(kernels, call) if (!(kernels)->panels) { call; }
#define LI_BACKWARD_OF_REFERENCE(name) li_##name##_reference
#else
#define LI_REFERENCE_TRAINS false
#define LI_BY_BACKWARD_REFERENCE(kernels, call)
#define LI_BACKWARD_OF_REFERENCE(name) NULL
#endif
#else
#define LI_FN LI_HOT
#define LI_MATH LI_INLINE /* exp and its like */
/* A set that extends another one has that set's loops, LI_G(name), and products of its own: in >>int8, in >>gemm, or by
   tiles at the end of >>gemm. */
#undef LI_K
#undef LI_G
#undef LI_PASS_INT8
#undef LI_PASS_LOOPS
#undef LI_PASS_PRODUCTS
#undef LI_PASS_TILES
#if LI_IS(scalar)
#define LI_K(name) li_##name##_scalar
#elif LI_IS(sse2)
#define LI_K(name) li_##name##_sse2
#elif LI_IS(avx2)
#define LI_K(name) li_##name##_avx2
#elif LI_IS(avx512)
#define LI_K(name) li_##name##_avx512
#elif LI_IS(neon)
#define LI_K(name) li_##name##_neon
#elif LI_IS(wasm)
#define LI_K(name) li_##name##_wasm
#elif LI_IS(avxvnni)
#define LI_K(name) li_##name##_avxvnni
#define LI_G(name) li_##name##_avx2
#define LI_PASS_INT8
#elif LI_IS(vnni)
#define LI_K(name) li_##name##_vnni
#define LI_G(name) li_##name##_avx512
#define LI_PASS_INT8
#elif LI_IS(bf16)
#define LI_K(name) li_##name##_bf16
#define LI_G(name) li_##name##_avx512
#define LI_PASS_PRODUCTS
#elif LI_IS(amx)
#define LI_K(name) li_##name##_amx
#define LI_G(name) li_##name##_avx512
#define LI_PASS_TILES
#endif
#if LI_IS(scalar) && LI_BASELINE != LI_ISA_scalar /* vocabulary for single numbers */
#undef LI_MATH
#define LI_MATH LI_FN
#elif !defined(LI_G)
#define LI_G LI_K
#ifndef LUNA_NO_INT8
#define LI_PASS_INT8
#endif
#define LI_PASS_LOOPS
#define LI_PASS_PRODUCTS
#define LI_FIELD(result, name, arguments) LI_FN result LI_K(name) arguments;
LI_KERNELS(LI_FIELD, LI_FIELD, LI_FIELD)
LI_LOOPS(LI_FIELD, LI_FIELD)
#undef LI_FIELD
#endif

/* ----------------
   >>vector: VF floats at a time, and the functions that every kernel needs
   vf_fma and vf_fnma are fused where the instruction set can fuse; elsewhere they round twice. vf_divides is 1 if
   they divide in >>int8, for which they must be fused. vf_max(a, b) is a > b ? a : b, so it is b when either is NaN.
   Macros that every pass shares are defined once. Guarded by tests/kernels/vectors.c.
   ---------------- */
#undef LI_MM
#undef LI_MZ
#undef LI_SI
#undef LI_PS
#undef vi
#undef VF
#undef vf
#undef vm
#undef vf_set
#undef vf_load
#undef vf_store
#undef vf_first
#undef vf_add
#undef vf_sub
#undef vf_mul
#undef vf_div
#undef vf_divides
#undef vf_fma
#undef vf_fnma
#undef vf_max
#undef vf_min
#undef vf_sqrt
#undef vf_abs
#undef vf_lt
#undef vf_le
#undef vf_select
#define vf_of(number) vf_set((float)(number))
#define vf_zero() vf_set((float)0)
#define vf_neg(x) vf_sub(vf_set(0), x)
#define vf_exp2 LI_K(exp2)
#define vf_log1p LI_K(log1p)
#define vf_tanh LI_K(tanh)
#define vf_half_gauss LI_K(half_gauss)
#define vf_normal_cdf(x) LI_K(normal_cdf)(x, LI_K(half_gauss)(x))
#define vf_gt(a, b) vf_lt(b, a)
#define vf_load_part LI_K(load_part)
#define vf_store_part LI_K(store_part)
#define vf_sum LI_K(sum_lanes)
#define vf_hmax LI_K(max_lanes)
#define vf_exp LI_K(exp)
#define vf_log LI_K(log)

#if defined(__GNUC__) || defined(__clang__)
#define LI_PREFETCH(p) __builtin_prefetch(p)
#ifdef __clang__
#define LI_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__CUDACC__) || __GNUC__ < 8 /* They would warn. */
#define LI_UNROLL
#else
#define LI_UNROLL _Pragma("GCC unroll 28")
#endif
#else
#define LI_UNROLL
#define LI_PREFETCH(p) ((void)0)
#endif

/* nearest(x) is the nearest whole number for |x| < 2^20; for any other x it is some whole number, or not finite.
   upper(x) rounds x, unless NaN, to its upper 16 bits, ties to even. scale2(x, n) is x 2^n, by an addition to the
   exponent. split(x, e) gives m and e with x = m 2^e and m in [sqrt(1/2), sqrt(2)), for normal x > 0. On x86, four(max,
   v) reduces a vector to four lanes, by sum or maximum; a vi is a vector of integers; LI_MM and LI_SI make an
   intrinsic's name. LI_MZ makes the maskz form for AVX-512, since gcc 12 warns of an undefined operand in the other. */
#if LI_IS(avx512) || LI_IS(vnni) || LI_IS(bf16) || LI_IS(amx)
#define VF 16
#define vf __m512
#define vm __mmask16
#define vi __m512i
#define LI_MM(name) _mm512_##name
#define LI_MZ(mask, name, ...) _mm512_maskz_##name(mask, __VA_ARGS__)
#define LI_SI(name) _mm512_##name##_si512
#define LI_PS _mm512_castsi512_ps
#define vf_divides 1
#define vf_fma _mm512_fmadd_ps
#define vf_fnma _mm512_fnmadd_ps
#define vf_lt(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define vf_le(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ)
#define vf_select(m, a, b) _mm512_mask_blend_ps(m, b, a)
LI_INLINE vf vf_load_part(const float *p, int64_t n) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
LI_INLINE void vf_store_part(float *p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v); }
LI_INLINE __m128 LI_K(four)(bool max, vf v) {
  const __m256 low8 = _mm512_extractf32x8_ps(v, 0), high8 = _mm512_extractf32x8_ps(v, 1);
  const __m256 eight = max ? _mm256_max_ps(low8, high8) : _mm256_add_ps(low8, high8);
  const __m128 low = _mm256_castps256_ps128(eight), high = _mm256_extractf128_ps(eight, 1);
  if (max) return _mm_max_ps(low, high);
  return _mm_add_ps(low, high);
}
LI_INLINE vf LI_K(nearest)(vf x) { return _mm512_maskz_cvtepi32_ps(0xFFFF, _mm512_maskz_cvtps_epi32(0xFFFF, x)); }
LI_INLINE vf LI_K(scale2)(vf x, vf n) { return _mm512_maskz_scalef_ps(0xFFFF, x, n); }

#elif LI_IS(avx2) || LI_IS(avxvnni)
#define VF 8
#define vf __m256
#define vm __m256
#define vi __m256i
#define LI_MM(name) _mm256_##name
#define LI_MZ(mask, name, ...) _mm256_##name(__VA_ARGS__)
#define LI_SI(name) _mm256_##name##_si256
#define LI_PS _mm256_castsi256_ps
#define vf_divides 1
#define vf_fma _mm256_fmadd_ps
#define vf_fnma _mm256_fnmadd_ps
#define vf_lt(a, b) _mm256_cmp_ps(a, b, _CMP_LT_OQ)
#define vf_le(a, b) _mm256_cmp_ps(a, b, _CMP_LE_OQ)
#define vf_select(m, a, b) _mm256_blendv_ps(b, a, m)
LI_INLINE __m256i LI_K(first_lanes)(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LI_INLINE vf vf_load_part(const float *p, int64_t n) { return _mm256_maskload_ps(p, LI_K(first_lanes)(n)); }
LI_INLINE void vf_store_part(float *p, vf v, int64_t n) { _mm256_maskstore_ps(p, LI_K(first_lanes)(n), v); }
LI_INLINE __m128 LI_K(four)(bool max, vf v) {
  const __m128 low = _mm256_castps256_ps128(v), high = _mm256_extractf128_ps(v, 1);
  if (max) return _mm_max_ps(low, high);
  return _mm_add_ps(low, high);
}
LI_INLINE vf LI_K(nearest)(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#elif LI_IS(sse2)
#define VF 4
#define vf __m128
#define vm __m128
#define vi __m128i
#define LI_MM(name) _mm_##name
#define LI_MZ(mask, name, ...) _mm_##name(__VA_ARGS__)
#define LI_SI(name) _mm_##name##_si128
#define LI_PS _mm_castsi128_ps
#define vf_divides 0
#define vf_fma(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
#define vf_fnma(a, b, c) _mm_sub_ps(c, _mm_mul_ps(a, b))
#define vf_lt _mm_cmplt_ps
#define vf_le _mm_cmple_ps
#define vf_select LI_K(select)
LI_INLINE vf vf_select(vm m, vf a, vf b) { return _mm_or_ps(_mm_and_ps(m, a), _mm_andnot_ps(m, b)); }
LI_CALL vf vf_load_part(const float *p, int64_t n) {
  if (n >= 3)
    return _mm_movelh_ps(_mm_setr_ps(p[0], p[1], 0, 0), n > 3 ? _mm_setr_ps(p[2], p[3], 0, 0) : _mm_load_ss(p + 2));
  if (n == 2) return _mm_setr_ps(p[0], p[1], 0, 0);
  if (n == 1) return _mm_load_ss(p);
  return _mm_setzero_ps();
}
LI_CALL void vf_store_part(float *p, vf v, int64_t n) {
  if (n >= VF) {
    _mm_storeu_ps(p, v);
    return;
  }
  if (n & 2) {
    _mm_storel_pi((__m64 *)(void *)p, v);
    p += 2;
    v = _mm_movehl_ps(v, v);
  }
  if (n & 1) _mm_store_ss(p, v);
}
LI_INLINE __m128 LI_K(four)(bool max, vf v) { return (void)max, v; }
LI_INLINE vf LI_K(nearest)(vf x) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(x)); }

#elif LI_IS(neon)
#define VF 4
#define vf float32x4_t
#define vm uint32x4_t
#define vf_set vdupq_n_f32
#define vf_load vld1q_f32
#define vf_store vst1q_f32
#define vf_first(v) vgetq_lane_f32(v, 0)
#define vf_add vaddq_f32
#define vf_sub vsubq_f32
#define vf_mul vmulq_f32
#define vf_div vdivq_f32
#define vf_divides 0
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_fnma(a, b, c) vfmsq_f32(c, a, b)
#define vf_max LI_K(max)
#define vf_min LI_K(min)
#define vf_sqrt vsqrtq_f32
#define vf_abs vabsq_f32
#define vf_lt vcltq_f32
#define vf_le vcleq_f32
#define vf_select vbslq_f32
LI_INLINE vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
LI_INLINE vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
/* By halves, as the other sets add; vaddvq_f32 does not. */
LI_INLINE float vf_sum(vf v) {
  const float32x2_t a = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vget_lane_f32(a, 0) + vget_lane_f32(a, 1);
}
LI_INLINE float vf_hmax(vf v) { return vmaxvq_f32(v); }
#define v4_low vzip1q_f32
#define v4_high vzip2q_f32
LI_INLINE vf LI_K(nearest)(vf x) { return vrndnq_f32(x); }
LI_INLINE vf LI_K(upper)(vf x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7FFF));
  return vreinterpretq_f32_u32(vandq_u32(sum, vdupq_n_u32(0xFFFF0000u)));
}
LI_INLINE vf LI_K(scale2)(vf x, vf n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
}
LI_INLINE vf LI_K(split)(vf x, vf *e) {
  const int32x4_t bits = vreinterpretq_s32_f32(x), n = vshrq_n_s32(vsubq_s32(bits, vdupq_n_s32(0x3F3504F3)), 23);
  *e = vcvtq_f32_s32(n);
  return vreinterpretq_f32_s32(vsubq_s32(bits, vshlq_n_s32(n, 23)));
}

#elif LI_IS(wasm)
#define VF 4
#define vf v128_t
#define vm v128_t
#define vf_set wasm_f32x4_splat
#define vf_load wasm_v128_load
#define vf_store wasm_v128_store
#define vf_first(v) wasm_f32x4_extract_lane(v, 0)
#define vf_add wasm_f32x4_add
#define vf_sub wasm_f32x4_sub
#define vf_mul wasm_f32x4_mul
#define vf_div wasm_f32x4_div
#define vf_divides 0
#define vf_fma(a, b, c) wasm_f32x4_add(wasm_f32x4_mul(a, b), c)
#define vf_fnma(a, b, c) wasm_f32x4_sub(c, wasm_f32x4_mul(a, b))
#define vf_max(a, b) wasm_f32x4_pmax(b, a)
#define vf_min(a, b) wasm_f32x4_pmin(b, a)
#define vf_sqrt wasm_f32x4_sqrt
#define vf_abs wasm_f32x4_abs
#define vf_lt wasm_f32x4_lt
#define vf_le wasm_f32x4_le
#define vf_select(m, a, b) wasm_v128_bitselect(a, b, m)
LI_INLINE float vf_sum(vf v) {
  const vf a = wasm_f32x4_add(v, wasm_i32x4_shuffle(v, v, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1);
}
LI_INLINE float vf_hmax(vf v) {
  const vf a = vf_max(v, wasm_i32x4_shuffle(v, v, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(vf_max(a, wasm_i32x4_shuffle(a, a, 1, 0, 3, 2)), 0);
}
#define v4_low(a, b) wasm_i32x4_shuffle(a, b, 0, 4, 1, 5)
#define v4_high(a, b) wasm_i32x4_shuffle(a, b, 2, 6, 3, 7)
LI_INLINE vf LI_K(nearest)(vf x) { return wasm_f32x4_nearest(x); }
LI_INLINE vf LI_K(upper)(vf x) {
  const v128_t odd = wasm_v128_and(wasm_u32x4_shr(x, 16), wasm_i32x4_splat(1));
  return wasm_v128_and(wasm_i32x4_add(wasm_i32x4_add(x, odd), wasm_i32x4_splat(0x7FFF)), wasm_i32x4_splat(-65536));
}
LI_INLINE vf LI_K(scale2)(vf x, vf n) {
  return wasm_i32x4_add(x, wasm_i32x4_shl(wasm_i32x4_trunc_sat_f32x4(n), 23));
}
LI_INLINE vf LI_K(split)(vf x, vf *e) {
  const v128_t n = wasm_i32x4_shr(wasm_i32x4_sub(x, wasm_i32x4_splat(0x3F3504F3)), 23);
  *e = wasm_f32x4_convert_i32x4(n);
  return wasm_i32x4_sub(x, wasm_i32x4_shl(n, 23));
}

#else
#define VF 1
#define vf float
#define vm bool
#define vf_set(x) (x)
#define vf_load(p) (*(p))
#define vf_store(p, v) ((void)(*(p) = (v)))
#define vf_first(v) (v)
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_div(a, b) ((a) / (b))
#define vf_divides 0
#define vf_fma(a, b, c) ((a) * (b) + (c))
#define vf_fnma(a, b, c) ((c) - (a) * (b))
#define vf_max LI_K(max)
#define vf_min LI_K(min)
#ifdef LI_DOUBLE
#define vf_sqrt sqrt
#define vf_abs fabs
#else
#define vf_sqrt sqrtf
#define vf_abs fabsf
#endif
#define vf_lt(a, b) ((a) < (b))
#define vf_le(a, b) ((a) <= (b))
#define vf_select(m, a, b) ((m) ? (a) : (b))
LI_INLINE vf vf_max(vf a, vf b) { return a > b ? a : b; }
LI_INLINE vf vf_min(vf a, vf b) { return a < b ? a : b; }
LI_INLINE vf vf_load_part(const float *p, int64_t n) { return n > 0 ? *p : 0; }
LI_INLINE void vf_store_part(float *p, vf v, int64_t n) { if (n > 0) *p = v; }
LI_INLINE float vf_sum(vf v) { return v; }
LI_INLINE float vf_hmax(vf v) { return v; }
#ifndef LI_DOUBLE
LI_INLINE vf LI_K(upper)(vf x) { return li_upper(x); }
LI_INLINE vf LI_K(nearest)(vf x) {
  const float half = x < 0 ? -0.5f : 0.5f;
  if (x > -1e6f && x < 1e6f) return (float)(int32_t)(x + half);
  return 0.0f;
}
LI_INLINE vf LI_K(scale2)(vf x, vf n) { return li_float_of(li_bits_of(x) + ((uint32_t)(int32_t)n << 23)); }
LI_INLINE vf LI_K(split)(vf x, vf *e) {
  const int32_t n = (int32_t)((li_bits_of(x) - 0x3F3504F3u + (127u << 23)) >> 23) - 127;
  *e = (float)n;
  return li_float_of(li_bits_of(x) - ((uint32_t)n << 23));
}
#endif
#endif

/* sum4: out[i] = alpha times the sum of v[i]'s lanes, with vf_sum's bits. */
#ifdef LI_MM
#define vf_set LI_MM(set1_ps)
#define vf_load LI_MM(loadu_ps)
#define vf_store LI_MM(storeu_ps)
#define vf_first LI_MM(cvtss_f32)
#define vf_add LI_MM(add_ps)
#define vf_sub LI_MM(sub_ps)
#define vf_mul LI_MM(mul_ps)
#define vf_div LI_MM(div_ps)
#define vf_max(a, b) LI_MZ(0xFFFF, max_ps, a, b)
#define vf_min(a, b) LI_MZ(0xFFFF, min_ps, a, b)
#define vf_sqrt(a) LI_MZ(0xFFFF, sqrt_ps, a)
#define vf_abs(a) LI_MM(andnot_ps)(vf_set(-0.0f), a)
LI_INLINE vf LI_K(upper)(vf x) {
  const vi bits = LI_SI(castps)(x);
  const vi odd = LI_SI(and)(LI_MZ(0xFFFF, srli_epi32, bits, 16), LI_MM(set1_epi32)(1));
  const vi sum = LI_MM(add_epi32)(LI_MM(add_epi32)(bits, odd), LI_MM(set1_epi32)(0x7FFF));
  return LI_PS(LI_SI(and)(sum, LI_MM(set1_epi32)(-65536)));
}
#if VF < 16
LI_INLINE vf LI_K(scale2)(vf x, vf n) {
  const vi exponent = LI_MM(slli_epi32)(LI_MM(cvtps_epi32)(n), 23);
  return LI_PS(LI_MM(add_epi32)(LI_SI(castps)(x), exponent));
}
#endif
LI_INLINE vf LI_K(split)(vf x, vf *e) {
  const vi bits = LI_SI(castps)(x), from = LI_MM(sub_epi32)(bits, LI_MM(set1_epi32)(0x3F3504F3));
  const vi n = LI_MZ(0xFFFF, srai_epi32, from, 23);
  *e = LI_MZ(0xFFFF, cvtepi32_ps, n);
  return LI_PS(LI_MM(sub_epi32)(bits, LI_MZ(0xFFFF, slli_epi32, n, 23)));
}
#define v4 __m128
#define v4_load _mm_loadu_ps
#define v4_store _mm_storeu_ps
#define v4_low _mm_unpacklo_ps
#define v4_high _mm_unpackhi_ps
LI_INLINE float vf_hmax(vf v) {
  const __m128 b = LI_K(four)(true, v), c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
LI_INLINE float vf_sum(vf v) {
  const __m128 b = LI_K(four)(false, v), c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
LI_INLINE void LI_K(sum4)(const vf *v, float alpha, float *out) {
  const __m128 a = LI_K(four)(false, v[0]), b = LI_K(four)(false, v[1]), c = LI_K(four)(false, v[2]),
      d = LI_K(four)(false, v[3]);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b)),
      cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(out, _mm_mul_ps(_mm_set1_ps(alpha), _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab))));
}
#else
LI_INLINE void LI_K(sum4)(const vf *v, float alpha, float *out) {
  for (int i = 0; i < 4; i++) out[i] = alpha * vf_sum(v[i]);
}
#endif

#if LI_IS(neon) || LI_IS(wasm)
#define v4 vf
#define v4_load vf_load
#define v4_store vf_store
LI_CALL vf vf_load_part(const float *p, int64_t n) {
  float lanes[VF] = {0, 0, 0, 0};
  for (int64_t i = 0; i < n; i++) lanes[i] = p[i];
  return vf_load(lanes);
}
LI_CALL void vf_store_part(float *p, vf v, int64_t n) {
  float lanes[VF];
  vf_store(lanes, v);
  for (int64_t i = 0; i < n; i++) p[i] = lanes[i];
}
#endif

static const float LI_K(lanes)[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Loads a vector of which only `left` > 0 floats exist. The rest becomes 0, or `fill`. */
LI_INLINE vf LI_K(get)(const float *p, int64_t left) { return left >= VF ? vf_load(p) : vf_load_part(p, left); }
LI_INLINE vf LI_K(get_filled)(const float *p, int64_t left, vf fill) {
  if (left >= VF) return vf_load(p);
  return vf_select(vf_lt(vf_load(LI_K(lanes)), vf_set((float)left)), vf_load_part(p, left), fill);
}
LI_INLINE void LI_K(put)(float *p, vf v, int64_t left) {
  if (left >= VF) vf_store(p, v);
  else vf_store_part(p, v, left);
}

/* Transposes in registers: to[p * step + i] = row_i[p] for i, p < 4. */
LI_INLINE void LI_K(turn4)(const float *row0, const float *row1, const float *row2, const float *row3, float *to,
                           int64_t step) {
#ifdef v4
  const v4 a = v4_load(row0), b = v4_load(row1), c = v4_load(row2), d = v4_load(row3);
  const v4 ac = v4_low(a, c), bd = v4_low(b, d), ac2 = v4_high(a, c), bd2 = v4_high(b, d);
  v4_store(to, v4_low(ac, bd));
  v4_store(to + step, v4_high(ac, bd));
  v4_store(to + 2 * step, v4_low(ac2, bd2));
  v4_store(to + 3 * step, v4_high(ac2, bd2));
#else
  for (int i = 0; i < 4; i++, to += step) to[0] = row0[i], to[1] = row1[i], to[2] = row2[i], to[3] = row3[i];
#endif
}

#ifdef LI_DOUBLE
LI_MATH vf vf_exp(vf x) { return exp(x); }
LI_MATH vf vf_log(vf x) { return log(x); }
LI_MATH vf LI_K(exp2)(vf x) { return exp2(x); }
LI_MATH vf LI_K(log1p)(vf x) { return log1p(x); }
LI_MATH vf LI_K(tanh)(vf x) { return tanh(x); }
LI_MATH vf LI_K(normal_cdf)(vf x, vf e) { (void)e; return 0.5 * erfc(-0.70710678118654752440 * x); }
#else
LI_INLINE vf LI_K(horner)(vf p, vf x, float a, float b, float c) {
  return vf_fma(vf_fma(vf_fma(p, x, vf_set(a)), x, vf_set(b)), x, vf_set(c));
}
/* Computes e^r 2^n for |r| <= ln(2)/2, as 1 + r + r^2 P(r). */
LI_INLINE vf LI_K(exp_of)(vf r, vf n) {
  vf p = LI_K(horner)(vf_set(1.381422187e-03f), r, 8.368898669e-03f, 4.166840572e-02f, 1.666651913e-01f);
  p = vf_fma(vf_fma(p, r, vf_set(4.999999335e-01f)), vf_mul(r, r), r);
  return LI_K(scale2)(vf_add(p, vf_set(1.0f)), n);
}
LI_MATH vf vf_exp(vf x) {
  const vf n = LI_K(nearest)(vf_mul(x, vf_set(1.44269504f)));
  const vf r = vf_fnma(n, vf_set(-2.12194440e-4f), vf_fnma(n, vf_set(0.693359375f), x));
  const vf y = vf_select(vf_lt(x, vf_set(-87.3365402f)), vf_zero(), LI_K(exp_of)(r, n));
  return vf_select(vf_le(x, vf_set(88.7228317f)), y, vf_mul(x, vf_set(INFINITY)));
}
LI_MATH vf LI_K(exp2)(vf x) {
  const vf n = LI_K(nearest)(x);
  const vf y = vf_select(vf_lt(x, vf_set(-126.0f)), vf_zero(),
                         LI_K(exp_of)(vf_mul(vf_sub(x, n), vf_set(0.693147181f)), n));
  return vf_select(vf_lt(x, vf_set(128.0f)), y, vf_mul(x, vf_set(INFINITY)));
}
/* Computes ln x for normal x = m 2^e: f = m - 1, ln(1 + f) = f - f^2/2 + f^3 P(f). */
LI_INLINE vf LI_K(log_of)(vf x) {
  vf e;
  const vf f = vf_sub(LI_K(split)(x, &e), vf_set(1.0f)), square = vf_mul(f, f);
  vf p = LI_K(horner)(vf_set(-7.634496512e-02f), f, 1.276157704e-01f, -1.316018240e-01f, 1.420175800e-01f);
  p = LI_K(horner)(p, f, -1.662335734e-01f, 2.000122688e-01f, -2.500082103e-01f);
  p = vf_fma(p, f, vf_set(3.333333171e-01f));
  p = vf_fma(e, vf_set(-2.12194440e-4f), vf_mul(vf_mul(p, f), square));
  p = vf_fnma(vf_set(0.5f), square, p);
  return vf_fma(e, vf_set(0.693359375f), vf_add(p, f));
}
/* Computes ln x for x > 0; the result is -Inf for 0 and below. A subnormal x is scaled by 2^23. */
LI_MATH vf vf_log(vf x) {
  const vm tiny = vf_lt(x, vf_set(1.17549435e-38f));
  const vf y = LI_K(log_of)(vf_select(tiny, vf_mul(x, vf_set(8388608.0f)), x));
  const vf z = vf_sub(y, vf_select(tiny, vf_set(15.9423851f), vf_zero()));
  return vf_select(vf_le(x, vf_zero()), vf_set(-INFINITY), vf_select(vf_lt(x, vf_set(INFINITY)), z, x));
}
/* Computes ln(1 + x) for 0 <= x <= 1, with a first-order correction for the rounding of 1 + x. */
LI_MATH vf LI_K(log1p)(vf x) {
  const vf one = vf_set(1.0f), u = vf_add(one, x);
  return vf_add(LI_K(log_of)(u), vf_div(vf_sub(x, vf_sub(u, one)), u));
}
/* Computes erfc(a) for a >= 0 and e = exp(-a^2), as e times a polynomial in t = 1/(1 + 0.4 a). */
LI_INLINE vf LI_K(erfc_of)(vf a, vf e) {
  const vf t = vf_div(vf_set(1.0f), vf_fma(a, vf_set(0.4f), vf_set(1.0f)));
  vf p = LI_K(horner)(vf_set(4.125306336e-02f), t, -1.403193500e-01f, 8.398751562e-02f, 8.796408696e-02f);
  p = LI_K(horner)(p, t, 7.975665838e-02f, 1.933931405e-01f, 2.018876065e-01f);
  p = vf_fma(vf_fma(p, t, vf_set(2.264431092e-01f)), t, vf_set(2.256342313e-01f));
  return vf_mul(vf_mul(p, t), e);
}
/* Uses x + x^3 P(x^2) up to 0.625 (Cephes' tanhf), then 1 - 2 / (e^(2 x) + 1). */
LI_MATH vf LI_K(tanh)(vf x) {
  const vf a = vf_abs(x), square = vf_mul(x, x), one = vf_set(1.0f);
  const vf large = vf_sub(one, vf_div(vf_set(2.0f), vf_add(vf_exp(vf_add(a, a)), one)));
  vf p = LI_K(horner)(vf_set(-5.70498872745e-3f), square, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f);
  p = vf_mul(vf_fma(vf_fma(p, square, vf_set(-3.33332819422e-1f)), square, one), x);
  return vf_select(vf_lt(a, vf_set(0.625f)), p, vf_select(vf_lt(x, vf_zero()), vf_sub(vf_zero(), large), large));
}
/* Computes P(X <= x) for a standard normal X and e = exp(-x^2/2). The smaller tail is computed, so neither loses
   digits. */
LI_MATH vf LI_K(normal_cdf)(vf x, vf e) {
  const vf tail = vf_mul(vf_set(0.5f), LI_K(erfc_of)(vf_mul(vf_abs(x), vf_set(0.707106781f)), e));
  return vf_select(vf_lt(x, vf_zero()), tail, vf_sub(vf_set(1.0f), tail));
}
#endif
LI_FN float LI_K(exp1)(float x) { return vf_first(vf_exp(vf_set(x))); }
LI_FN float LI_K(log1)(float x) { return vf_first(vf_log(vf_set(x))); }

/* e^(-x^2 / 2) */
LI_INLINE vf LI_K(half_gauss)(vf x) { return vf_exp(vf_mul(vf_mul(x, vf_of(-0.5)), x)); }

#define LI_VALUE(NAME, name, value, slope) case LUNA_ACTIVATION_##NAME: return value;
#define LI_SLOPE(NAME, name, value, slope) case LUNA_ACTIVATION_##NAME: { const vf y = value; (void)y; \
    return slope; }
LI_INLINE vf LI_K(map1)(int kind, vf x) { switch (kind) { LUNA_MAPS(LI_VALUE) default: return x; } }
LI_INLINE vf LI_K(map1_slope)(int kind, vf x) {
  switch (kind) { LUNA_MAPS(LI_SLOPE) default: return vf_of(1); }
}
/* LUNA_ELEMENTWISE: the value, and the gradient of an input when the result's is g. */
#undef LI_EACH
#define LI_EACH(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) case LUNA_OP_##NAME: return value;
LI_INLINE vf LI_K(elementwise1)(int kind, vf a, vf b, vf c) {
  switch (kind) { LUNA_ELEMENTWISE(LI_EACH) default: return c; }
}
#undef LI_EACH
#define LI_EACH(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) \
  case LUNA_OP_##NAME: \
    if (input == 0) return da; \
    if (input == 1) return db; \
    return dc;
LI_INLINE vf LI_K(elementwise1_slope)(int kind, int input, vf a, vf b, vf c, vf g) {
  (void)c;
  switch (kind) { LUNA_ELEMENTWISE(LI_EACH) default: return g; }
}
LI_FN float LI_K(activation)(int kind, float x) { return vf_first(LI_K(map1)(kind, vf_set(x))); }
LI_FN float LI_K(each)(int kind, float a, float b, float c) {
  return vf_first(LI_K(elementwise1)(kind, vf_set(a), vf_set(b), vf_set(c)));
}
#endif /* LI_PASS */

/* ----------------
   >>int8: y = act(x W^T + bias) + residual in 8 bits; x [m, k] float, W [n, k] li_int8 -> y [m, n]
   A row of W or x has the scale s = max |x| / 127 and the integers q = x / s, rounded to nearest, ties to even. An
   element of y is (float)(sum of q_w q_x) (s_w s_x) + bias. The sum is exact in int32 for k <= LI_INT8_MAX: it is the
   same in any order and on every machine. A row whose largest |x| is below 1e-30 counts as zeros. A row with NaN or Inf
   makes its results NaN. Guarded by tests/kernels/int8.c.
   ---------------- */
#define LI_INT8_MIN 16 /* Narrower weights are not worth it. */
#define LI_INT8_MAX 132104 /* 128 127 k < 2^31 */
#ifdef LUNA_NO_INT8
#define LI_HAS_INT8 false
#else
#define LI_HAS_INT8 true
#endif
#ifndef LI_PASS
LI_HOT float li_int8_scale(float largest) { return largest < 1e-30f ? 0 : largest / 127; }
/* Needs |x| <= 127 scale, or scale 0. Adding 1.5 2^23 rounds, and leaves the integer in the low bits. */
LI_INLINE int8_t li_int8_of(float x, float scale) {
  return (int8_t)(uint8_t)(li_bits_of((scale > 0 ? x / scale : 0) + 12582912.0f) & 255);
}
LI_HOT float li_int8_row_scale(int64_t k, const float *x) {
  float largest = 0;
  for (int64_t i = 0; i < k; i++) {
    if (!li_is_finite(x[i])) return NAN;
    if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
  }
  return li_int8_scale(largest);
}
LI_FN void li_int8_reference(const li_gemm *g) {
  const li_int8 *w = g->b_int8;
  for (int64_t i = 0; i < g->m; i++) {
    const float *x = g->a + i * g->a_row, scale = li_int8_row_scale(g->k, x);
    float *y = g->c + i * g->c_row;
    for (int64_t j = 0, row = g->b_first; j < g->n; j++, row++) {
      int32_t sum = 0;
      for (int64_t p = 0; p < g->k; p++) sum += w->at[row * g->k + p] * li_int8_of(x[p], scale);
      y[j] = (float)sum * (w->scale[row] * scale) + (g->bias ? g->bias[j] : 0);
      y[j] = li_activation_scalar(g->activation, y[j]) + (g->residual ? g->residual[i * g->c_row + j] : 0);
    }
  }
}

LI_FN bool li_int8_fits(int64_t columns) { return columns >= LI_INT8_MIN && columns <= LI_INT8_MAX; }
LI_FN bool li_ends(const char *name, const char *with) {
  const size_t size = strlen(name), end = strlen(with);
  return size >= end && strcmp(name + size - end, with) == 0;
}
/* Tells whether a parameter may have 8 bits. Matrices of products and embeddings are named NAME.weight. A router keeps
   its 32, because rounding would choose other slots. */
LI_FN bool li_int8_part(const char *name, int rank, const int64_t *shape) {
  return rank == 2 && li_int8_fits(shape[1]) && li_ends(name, ".weight") && !li_ends(name, "conv.weight") &&
         !li_ends(name, "positions.weight") && !li_ends(name, "router_proj.weight");
}

LI_FN size_t li_int8_bytes(int64_t rows, int64_t columns) {
  return li_round(sizeof(li_int8)) + 2 * li_round((size_t)rows * 4) + li_round((size_t)(rows * columns));
}
LI_FN li_int8 *li_int8_place(void *memory, int64_t rows, int64_t columns) {
  li_int8 *w = (li_int8 *)memory;
  char *at = (char *)memory + li_round(sizeof *w);
  memset(w, 0, sizeof *w);
  w->rows = rows;
  w->columns = columns;
  w->scale = (const float *)(void *)at;
  w->sums = (const int32_t *)(void *)(at += li_round((size_t)rows * 4));
  w->at = (const int8_t *)(at + li_round((size_t)rows * 4));
  return w;
}
LI_HOT void li_int8_sum(li_int8 *w) {
  int32_t *sums = (int32_t *)(uintptr_t)w->sums;
  for (int64_t r = 0; r < w->rows; r++) {
    sums[r] = 0;
    for (int64_t i = 0; i < w->columns; i++) sums[r] += w->at[r * w->columns + i];
  }
}
/* Returns false if a value is not finite. The scale of its row is then NaN. */
LI_HOT bool li_int8_fill(li_int8 *w, const float *values) {
  float *scale = (float *)(uintptr_t)w->scale;
  int8_t *at = (int8_t *)(uintptr_t)w->at;
  bool finite = true;
  for (int64_t r = 0; r < w->rows; r++, at += w->columns, values += w->columns) {
    scale[r] = li_int8_row_scale(w->columns, values);
    finite = finite && scale[r] == scale[r];
    for (int64_t i = 0; i < w->columns; i++) at[i] = li_int8_of(values[i], scale[r]);
  }
  li_int8_sum(w);
  return finite;
}

LI_HOT void li_int8_floats(const li_int8 *w, int64_t row, int64_t count, float *out) {
  for (int64_t i = 0; i < count * w->columns; i++)
    out[i] = (float)w->at[row * w->columns + i] * w->scale[row + i / w->columns];
}

/* An instruction set's loops read x as integers q of LI_QB bytes, in rows q_row bytes apart. Panels hold W in the
   layout [panel][k / LI_QK][LI_QN][LI_QK], zero padded. */
typedef struct li_int8_block { /* A block of y: m <= the loops' `most` rows by n columns */
  int64_t m, n, k, q_row;
  const char *q;
  const float *q_scale; /* [m] */
  const int8_t *w; /* Row-major; null: use panels */
  const char *panels;
  const float *scale, *bias; /* [n]; bias may be null */
  const int32_t *sums; /* [n] */
  float *c;
  int64_t c_row;
  const float *residual; /* As in li_gemm */
  bool relu;
} li_int8_block;
typedef struct li_int8_loops {
  int64_t qm, most;      /* Rows of a tile; at most of a block */
  int64_t qn, qk, bytes; /* LI_QN, LI_QK, LI_QB */
  float (*quantize)(int64_t k, const float *x, char *q);
  void (*panels)(int64_t n, int64_t k, const int8_t *w, char *panels);
  void (*rows)(const li_int8_block *b);
} li_int8_loops;
#endif

#ifdef LI_PASS_INT8
/* A vi holds VF int32, and q's integers are LI_QT. int8_dot reads LI_QX elements of a row-major row of W. A tile has
   LI_QM rows and LI_QV vectors. In vi_multiply(sum, x, w) each lane adds LI_QK products; all lanes have the same x,
   vi_each(p). vpdpbusd needs an unsigned x: q is 128 larger, and vi_floats subtracts 128 times the sum of W's row. */
#undef vi_zero
#undef vi_store
#undef vi_panel
#undef vi_each
#undef vi_multiply
#undef vi_add
#undef vi_floats
#undef LI_INT8_SUM
#undef LI_QT
#undef LI_QK
#undef LI_QM
#define LI_QB ((int64_t)sizeof(LI_QT))
#define LI_QV (VF > 1 ? 2 : 4)
#define LI_QN (LI_QV * VF)
#define LI_QX (VF > 1 ? 4 * VF / (int)LI_QB : 1)
LI_INLINE int32_t LI_K(int8_word)(const void *p) {
  int32_t x;
  memcpy(&x, p, sizeof x);
  return x;
}
#if LI_IS(vnni)
#define LI_QT int8_t
#define LI_QK 4
#define LI_QM 14
#define vi_multiply _mm512_dpbusd_epi32
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const __m512i n = _mm512_add_epi32(_mm512_maskz_cvtps_epi32(0xFFFF, x), _mm512_set1_epi32(128));
  _mm_storeu_si128((__m128i *)(void *)q, _mm512_maskz_cvtepi32_epi8(0xFFFF, n));
}
#elif LI_IS(avxvnni)
#define LI_QT int8_t
#define LI_QK 4
#define LI_QM 6
#define vi_multiply _mm256_dpbusd_avx_epi32
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const __m256i n = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
  _mm_storel_epi64((__m128i *)(void *)q, _mm_add_epi8(_mm_packs_epi16(words, words), _mm_set1_epi8(-128)));
}
#elif LI_IS(avx512)
#define LI_QT int16_t
#define LI_QK 2
#define LI_QM 12
LI_INLINE vi LI_K(int8_wide)(const void *w) {
  return _mm512_maskz_cvtepi8_epi16(0xFFFFFFFF, _mm256_loadu_si256((const __m256i *)w));
}
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const __m512i n = _mm512_maskz_cvtps_epi32(0xFFFF, x);
  _mm256_storeu_si256((__m256i *)(void *)q, _mm512_maskz_cvtepi32_epi16(0xFFFF, n));
}
#elif LI_IS(avx2)
#define LI_QT int16_t
#define LI_QK 2
#define LI_QM 5 /* With 6, one sum would be spilled in each iteration. */
LI_INLINE vi LI_K(int8_wide)(const void *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w)); }
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const __m256i n = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i *)(void *)q, _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}
#elif LI_IS(sse2)
#define LI_QT int16_t
#define LI_QK 2
#define LI_QM 4
LI_INLINE vi LI_K(int8_wide)(const void *w) {
  const vi bytes = _mm_loadl_epi64((const __m128i *)w);
  return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
}
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const vi n = _mm_cvtps_epi32(x);
  _mm_storel_epi64((__m128i *)(void *)q, _mm_packs_epi32(n, n));
}
#elif LI_IS(neon)
#define vi int32x4_t
#define vi_zero() vdupq_n_s32(0)
#define vi_store vst1q_s32
#define LI_QM 8
#ifdef __ARM_FEATURE_DOTPROD
#define LI_QT int8_t
#define LI_QK 4
#define vi_panel(p) vld1q_s8((const int8_t *)(p))
#define vi_each(p) vreinterpretq_s8_s32(vdupq_n_s32(LI_K(int8_word)(p)))
#define vi_multiply(sum, x, w) vdotq_s32(sum, w, x)
LI_INLINE vi LI_K(int8_dot)(vi sum, const char *x, const int8_t *w) {
  return vdotq_s32(sum, vi_panel(w), vi_panel(x));
}
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const int16x4_t n = vmovn_s32(vcvtnq_s32_f32(x));
  vst1_lane_s32((int32_t *)(void *)q, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(n, n))), 0);
}
#else
#define LI_QT int16_t
#define LI_QK 1
#define vi_panel(p) vld1_s16((const int16_t *)(const void *)(p))
#define vi_each(p) vld1_dup_s16((const int16_t *)(const void *)(p))
#define vi_multiply vmlal_s16
LI_INLINE vi LI_K(int8_dot)(vi sum, const char *x, const int8_t *w) {
  const int16x8_t a = vld1q_s16((const int16_t *)(const void *)x), b = vmovl_s8(vld1_s8(w));
  return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b)), a, b);
}
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  vst1_s16((int16_t *)(void *)q, vmovn_s32(vcvtnq_s32_f32(x)));
}
#endif
#define vi_floats(p, sums, left) vcvtq_f32_s32(vld1q_s32(p))
#elif LI_IS(wasm)
#define LI_QT int16_t
#define LI_QK 2
#define LI_QM 4
#define vi v128_t
#define vi_zero() wasm_i32x4_splat(0)
#define vi_store wasm_v128_store
#define vi_panel wasm_v128_load
#define vi_each wasm_v128_load32_splat
#define vi_multiply(sum, x, w) wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(x, w))
LI_INLINE vi LI_K(int8_dot)(vi sum, const char *x, const int8_t *w) {
  return vi_multiply(sum, vi_panel(x), wasm_i16x8_load8x8(w));
}
#define vi_floats(p, sums, left) wasm_f32x4_convert_i32x4(wasm_v128_load(p))
LI_INLINE void LI_K(int8_put)(char *q, vf x) {
  const v128_t n = wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(x));
  wasm_v128_store64_lane(q, wasm_i16x8_narrow_i32x4(n, n), 0);
}
#else
#define LI_QT int16_t
#define LI_QK 1
#define LI_QM 4
#define vi int32_t
#define vi_zero() 0
#define vi_store(p, v) ((void)(*(p) = (v)))
#define vi_panel(p) (*(const int16_t *)(const void *)(p))
#define vi_each vi_panel
#define vi_multiply(sum, x, w) ((sum) + (x) * (w))
LI_INLINE vi LI_K(int8_dot)(vi sum, const char *x, const int8_t *w) {
  return sum + vi_panel(x) * *w;
}
#define vi_floats(p, sums, left) ((float)*(p))
LI_INLINE void LI_K(int8_put)(char *q, vf x) { *(int16_t *)(void *)q = li_int8_of(x, 1); }
#endif
#ifdef LI_MM
#define vi_zero LI_SI(setzero)
#define vi_store(p, v) LI_SI(storeu)((vi *)(void *)(p), v)
#define vi_panel(p) LI_SI(loadu)((const vi *)(const void *)(p))
#define vi_each(p) LI_MM(set1_epi32)(LI_K(int8_word)(p))
#define vi_add LI_MM(add_epi32)
#ifdef vi_multiply /* vpdpbusd */
LI_INLINE vi LI_K(int8_dot)(vi sum, const char *x, const int8_t *w) {
  return vi_multiply(sum, vi_panel(x), vi_panel(w));
}
#define vi_floats(p, sums, left) LI_K(int8_floats)(p, (const float *)(const void *)(sums), left)
LI_INLINE vf LI_K(int8_floats)(const int32_t *p, const float *sums, int64_t left) {
  const vi w = LI_SI(castps)(LI_K(get)(sums, left)), times128 = LI_MZ(0xFFFF, slli_epi32, w, 7);
  return LI_MZ(0xFFFF, cvtepi32_ps, LI_MM(sub_epi32)(vi_panel(p), times128));
}
#else
#define vi_multiply(sum, x, w) vi_add(sum, LI_MM(madd_epi16)(x, w))
LI_INLINE vi LI_K(int8_dot)(vi sum, const char *x, const int8_t *w) {
  return vi_multiply(sum, vi_panel(x), LI_K(int8_wide)(w));
}
#define vi_floats(p, sums, left) LI_MZ(0xFFFF, cvtepi32_ps, LI_SI(loadu)((const vi *)(const void *)(p)))
#endif
#endif

/* Adds the lanes of each of four vectors. */
#if LI_IS(vnni) || LI_IS(avx512)
LI_INLINE __m128i LI_K(int8_four)(vi v) {
  const __m256i a = _mm256_add_epi32(_mm512_maskz_extracti32x8_epi32(0xFF, v, 0),
                                     _mm512_maskz_extracti32x8_epi32(0xFF, v, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
#elif LI_IS(avxvnni) || LI_IS(avx2)
LI_INLINE __m128i LI_K(int8_four)(vi v) {
  return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
#elif LI_IS(sse2)
LI_INLINE __m128i LI_K(int8_four)(vi v) { return v; }
#elif LI_IS(neon)
#define vi_add vaddq_s32
#define LI_INT8_SUM vaddvq_s32
#elif LI_IS(wasm)
#define vi_add wasm_i32x4_add
#define LI_INT8_SUM(v) \
  (wasm_i32x4_extract_lane(v, 0) + wasm_i32x4_extract_lane(v, 1) + wasm_i32x4_extract_lane(v, 2) + \
   wasm_i32x4_extract_lane(v, 3))
#else
#define vi_add(a, b) ((a) + (b))
#define LI_INT8_SUM(v) (v)
#endif
LI_INLINE void LI_K(int8_sum4)(const vi *v, int32_t *out) {
#ifdef LI_INT8_SUM
  for (int i = 0; i < 4; i++) out[i] = LI_INT8_SUM(v[i]);
#else
  const __m128i a = LI_K(int8_four)(v[0]), b = LI_K(int8_four)(v[1]), c = LI_K(int8_four)(v[2]),
      d = LI_K(int8_four)(v[3]);
  const __m128i ab = _mm_add_epi32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)),
      cd = _mm_add_epi32(_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
  _mm_storeu_si128((__m128i *)(void *)out, _mm_add_epi32(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd)));
#endif
}

/* Rounds a row of x and returns its scale. q has room for whole vectors. */
LI_FN float LI_K(int8_quantize)(int64_t k, const float *x, char *q) {
  vf largest = vf_zero(), zero = vf_zero();
  for (int64_t i = 0; i < k; i += VF) {
    const vf v = LI_K(get)(x + i, k - i);
    largest = vf_max(vf_abs(v), largest);
    zero = vf_add(zero, vf_sub(v, v)); /* NaN for NaN, Inf */
  }
  const float scale = vf_sum(zero) == 0 ? li_int8_scale(vf_hmax(largest)) : NAN;
  const bool some = scale > 0, fused = vf_divides && scale > 1e-30f;
  const vf divisor = vf_set(some ? scale : 1), inverse = vf_div(vf_set(1), divisor);
  for (int64_t i = 0; i < k; i += VF) {
    const vf v = LI_K(get)(x + i, k - i), ratio = vf_mul(v, inverse);
    /* Where no remainder is denormal, this rounds as a division does, in a fraction of its time. */
    if (fused) LI_K(int8_put)(q + i * LI_QB, vf_fma(vf_fnma(ratio, divisor, v), inverse, ratio));
    else LI_K(int8_put)(q + i * LI_QB, some ? vf_div(v, divisor) : vf_zero());
  }
  return scale;
}

/* Copies n columns of W^T into panels. The last panel is zero padded. */
LI_FN void LI_K(int8_panels)(int64_t n, int64_t k, const int8_t *w, char *panels) {
  const int64_t lines = li_divide_up(k, LI_QK), whole = k / LI_QK;
  for (int64_t j = 0; j < n; j += LI_QN, panels += lines * LI_QN * LI_QK * LI_QB) {
    const int64_t columns = li_min(LI_QN, n - j);
    if (whole < lines || columns < LI_QN) memset(panels, 0, (size_t)(lines * LI_QN * LI_QK * LI_QB));
    for (int64_t i = 0; i < columns; i++, w += k) {
      char *to = panels + i * LI_QK * LI_QB;
      for (int64_t line = 0; line < lines; line++, to += LI_QN * LI_QK * LI_QB) {
        LI_QT word[LI_QK] = { 0 };
        if (line == whole)
          for (int64_t p = 0; p < k - whole * LI_QK; p++) word[p] = w[whole * LI_QK + p];
        else if (LI_QB == 1) memcpy(word, w + line * LI_QK, sizeof word);
        else
          for (int p = 0; p < LI_QK; p++) word[p] = w[line * LI_QK + p];
        memcpy(to, word, sizeof word);
      }
    }
  }
}

/* Converts `columns` <= LI_QN sums to floats of y. */
LI_INLINE void LI_K(int8_finish)(const li_int8_block *b, const int32_t *sum, int64_t row, int64_t j, int64_t columns) {
  const vf scale = vf_set(b->q_scale[row]);
  float *c = b->c + row * b->c_row + j;
  for (int64_t l = 0; l < columns; l += VF) {
    const int64_t left = columns - l;
    vf y = vi_floats(sum + l, b->sums + j + l, left);
    y = vf_mul(y, vf_mul(LI_K(get)(b->scale + j + l, left), scale));
    if (b->bias) y = vf_add(y, LI_K(get)(b->bias + j + l, left));
    if (b->relu) y = vf_max(vf_zero(), y);
    if (b->residual) y = vf_add(y, LI_K(get)(b->residual + row * b->c_row + j + l, left));
    LI_K(put)(c + l, y, left);
  }
}

/* Sums `rows` rows of q times a panel. As in tile_rows, every third row has a pointer. */
LI_INLINE void LI_K(int8_tile)(int rows, int64_t lines, const char *q, int64_t q_row, const char *panel, int32_t *out) {
  vi sum[LI_QM][LI_QV];
  const char *at[LI_QM / 3 + 1];
  LI_UNROLL
  for (int i = 0; i < rows; i++) {
    if (i % 3 == 0) at[i / 3] = q + i * q_row;
    LI_UNROLL
    for (int j = 0; j < LI_QV; j++) sum[i][j] = vi_zero();
  }
  for (; lines > 0; lines--, panel += LI_QN * LI_QK * LI_QB) {
    LI_UNROLL
    for (int i = 0; i < rows; i++) {
      LI_UNROLL
      for (int j = 0; j < LI_QV; j++)
        sum[i][j] = vi_multiply(sum[i][j], vi_each(at[i / 3] + i % 3 * q_row),
                                vi_panel(panel + j * VF * LI_QK * LI_QB));
    }
    LI_UNROLL
    for (int i = 0; i < rows; i += 3) at[i / 3] += LI_QK * LI_QB;
  }
  LI_UNROLL
  for (int i = 0; i < rows; i++) {
    LI_UNROLL
    for (int j = 0; j < LI_QV; j++) vi_store(out + i * LI_QN + j * VF, sum[i][j]);
  }
}
/* Multiplies a row of x by one of W, by lanes. The tail is copied, since nothing behind W may be read. */
LI_INLINE vi LI_K(int8_lanes)(int64_t k, const char *q, const int8_t *w) {
  vi sum0 = vi_zero(), sum1 = sum0;
  int64_t p = 0;
  for (; p + 2 * LI_QX <= k; p += 2 * LI_QX) {
    sum0 = LI_K(int8_dot)(sum0, q + p * LI_QB, w + p);
    sum1 = LI_K(int8_dot)(sum1, q + (p + LI_QX) * LI_QB, w + p + LI_QX);
  }
  for (; p < k; p += LI_QX) {
    int8_t tail[LI_QX] = { 0 };
    const bool whole = p + LI_QX <= k;
    if (!whole) memcpy(tail, w + p, (size_t)(k - p));
    sum0 = LI_K(int8_dot)(sum0, q + p * LI_QB, whole ? w + p : tail);
  }
  return vi_add(sum0, sum1);
}
LI_INLINE void LI_K(int8_dots)(int64_t n, int64_t k, const char *q, const int8_t *w, int32_t *out) {
  vi dot[LI_QN];
  int64_t i;
  for (i = 0; i < n; i++, w += k) dot[i] = LI_K(int8_lanes)(k, q, w);
  for (; i % 4; i++) dot[i] = vi_zero();
  for (i = 0; i < n; i += 4) LI_K(int8_sum4)(dot + i, out + i);
}

/* Computes a block of y by dot products, if it has `w`, or by tiles of LI_QM, 4 or 1 rows. */
LI_FN void LI_K(int8_rows)(const li_int8_block *b) {
  const int64_t lines = li_divide_up(b->k, LI_QK), panel = lines * LI_QN * LI_QK * LI_QB;
  int32_t out[LI_QM * LI_QN];
  for (int64_t j = 0; j < b->n; j += LI_QN)
    for (int64_t i = 0, rows; i < b->m; i += rows) {
      const int64_t columns = li_min(LI_QN, b->n - j);
      const char *q = b->q + i * b->q_row, *at = b->panels + j / LI_QN * panel;
      rows = 1;
      if (!b->w && b->m - i >= LI_QM) rows = LI_QM;
      else if (!b->w && b->m - i >= 4) rows = 4;
      if (b->w) LI_K(int8_dots)(columns, b->k, q, b->w + j * b->k, out);
      else if (rows == LI_QM) LI_K(int8_tile)(LI_QM, lines, q, b->q_row, at, out);
      else if (rows == 4) LI_K(int8_tile)(4, lines, q, b->q_row, at, out);
      else LI_K(int8_tile)(1, lines, q, b->q_row, at, out);
      for (int64_t r = 0; r < rows; r++)
        LI_K(int8_finish)(b, out + r * LI_QN, i + r, j, columns);
    }
}
static const li_int8_loops LI_K(int8_loops) = {
  LI_QM, LI_QM, LI_QN, LI_QK, LI_QB, LI_K(int8_quantize), LI_K(int8_panels), LI_K(int8_rows)
};
#elif !defined(LI_PASS)

/* ---- Driver: x [m, k], W [n, k] -> y [m, n]; x's rows become integers, then threads do rows or columns of y ---- */
#define LI_INT8_FEW 16 /* Up to this many rows of x read W directly; more read panels. */
typedef struct li_int8_work {
  const li_kernels *kernels;
  const li_int8_loops *loops;
  const li_gemm *g;
  char *q, *panels; /* q holds x's integers; panels holds each thread's, `columns` wide. */
  float *scales;    /* x's */
  int64_t q_row, columns;
  int64_t panel;    /* Bytes */
  size_t bytes;     /* Scratch size */
  bool dots;        /* The loops read W itself, without panels. */
  bool by_rows;     /* Threads share y's rows, else its columns. */
  int64_t parts;    /* Row or column parts */
} li_int8_work;
/* Lays the work out in scratch. With null it only counts. */
LI_FN li_int8_work li_int8_start(const li_kernels *kernels, const li_gemm *g, int64_t threads, void *scratch) {
  li_int8_work w;
  char *at = scratch ? (char *)scratch : (char *)&w, *const start = at;
  memset(&w, 0, sizeof w);
  w.kernels = kernels;
  w.loops = kernels->int8;
  w.g = g;
  w.dots = !g->b_panels && g->m <= LI_INT8_FEW;
  w.by_rows = !w.dots && g->m >= g->n;
  w.parts = w.by_rows ? li_divide_up(g->m, w.loops->qm) : li_divide_up(g->n, w.loops->qn);
  if (w.by_rows && !g->b_panels) w.parts = li_min(w.parts, threads); /* Each part makes all panels. */
  /* As LI_KA, this stride is seldom a power of two. */
  w.q_row = (int64_t)li_round((size_t)(g->k * w.loops->bytes)) + LI_ALIGN;
  w.panel = li_divide_up(g->k, w.loops->qk) * w.loops->qk * w.loops->qn * w.loops->bytes;
  w.columns = li_min(LI_NC / w.loops->qn, li_divide_up(g->n, w.loops->qn)) * w.loops->qn;
  w.scales = li_take(&at, g->m);
  w.q = at;
  at += g->m * w.q_row;
  w.panels = at;
  if (!w.dots && !g->b_panels) at += threads * (w.columns / w.loops->qn * w.panel);
  w.bytes = (size_t)(at - start);
  return w;
}
LI_FN size_t li_int8_panels_bytes(const li_kernels *kernels, const li_gemm *g) {
  const li_int8_work w = li_int8_start(kernels, g, 1, NULL);
  return (size_t)(li_divide_up(g->n, w.loops->qn) * w.panel);
}
LI_FN void li_int8_panels_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_int8_work *w = (const li_int8_work *)work;
  const li_gemm *g = w->g;
  const int64_t column = first * w->loops->qn, n = li_min(g->n, last * w->loops->qn) - column;
  (void)thread;
  w->loops->panels(n, g->k, g->b_int8->at + (g->b_first + column) * g->k, w->panels + first * w->panel);
}
LI_FN void li_int8_make_panels(const li_kernels *kernels, const li_gemm *g, const li_parallel *parallel, void *panels) {
  li_int8_work w = li_int8_start(kernels, g, 1, NULL);
  w.panels = (char *)panels;
  li_each(parallel, li_divide_up(g->n, w.loops->qn), li_int8_panels_task, &w);
}
LI_FN void li_int8_quantize_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_int8_work *w = (const li_int8_work *)work;
  (void)thread;
  for (int64_t i = first; i < last; i++)
    w->scales[i] = w->loops->quantize(w->g->k, w->g->a + i * w->g->a_row, w->q + i * w->q_row);
}

/* Computes y's rows [row, end) by columns [column, column + n), whose weights are in `panels` unless w->dots. The loops
   apply ReLU themselves; another activation follows each block, and has no residual. */
LI_FN void li_int8_multiply(const li_int8_work *w, int64_t row, int64_t end, int64_t column, int64_t n,
                            const char *panels) {
  const li_gemm *g = w->g;
  const int64_t weight = g->b_first + column;
  li_int8_block b;
  memset(&b, 0, sizeof b);
  b.n = n, b.k = g->k, b.q_row = w->q_row, b.c_row = g->c_row;
  b.w = w->dots ? g->b_int8->at + weight * g->k : NULL;
  b.panels = panels;
  b.scale = g->b_int8->scale + weight;
  b.sums = g->b_int8->sums + weight;
  b.bias = li_from(g->bias, column);
  b.relu = g->activation == LUNA_ACTIVATION_RELU;
  const bool activates = g->activation != LI_NO_ACTIVATION && !b.relu;
  for (; row < end; row += b.m) {
    b.m = li_min(end - row, w->loops->most);
    b.q = w->q + row * w->q_row;
    b.q_scale = w->scales + row;
    b.c = g->c + row * g->c_row + column;
    b.residual = li_from(g->residual, row * g->c_row + column);
    w->loops->rows(&b);
    for (int64_t i = 0; activates && i < b.m; i++)
      w->kernels->activate(g->activation, n, b.c + i * b.c_row, b.c + i * b.c_row);
  }
}

/* Computes parts [first, last) of y's rows or columns, as many columns at a time as panels have. */
LI_FN void li_int8_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_int8_work *w = (const li_int8_work *)work;
  const li_gemm *g = w->g;
  const int64_t qn = w->loops->qn;
  int64_t row = 0, row_end = g->m, column = 0, column_end = g->n;
  if (w->by_rows) {
    row = li_part_at(g->m, w->loops->qm, first, w->parts);
    row_end = li_part_at(g->m, w->loops->qm, last, w->parts);
  } else {
    column = li_part_at(g->n, qn, first, w->parts);
    column_end = li_part_at(g->n, qn, last, w->parts);
  }
  char *own = w->panels + thread * (w->columns / qn * w->panel);
  for (int64_t j = column, n; j < column_end && row < row_end; j += n) {
    n = li_min(w->columns, column_end - j);
    if (!w->dots && !g->b_panels) w->loops->panels(n, g->k, g->b_int8->at + (g->b_first + j) * g->k, own);
    li_int8_multiply(w, row, row_end, j, n, g->b_panels ? (const char *)g->b_panels + j / qn * w->panel : own);
  }
}
LI_FN void li_int8_run(const li_kernels *kernels, const li_gemm *g, const li_parallel *parallel, void *scratch) {
  li_int8_work w = li_int8_start(kernels, g, li_threads(parallel), scratch);
  li_each(parallel, g->m, li_int8_quantize_task, &w);
  li_each(parallel, w.parts, li_int8_task, &w);
}
#endif

/* ----------------
   >>gemm: C = act(alpha A B + bias) (+ C), or alpha A B + bias + residual; A [m, k], B [k, n], any strides
   B is copied into panels of NR columns, [panel][k][NR], zero padded. A tile of up to MR rows of C by one panel stays
   in registers while k runs in order over a block of KC, and blocks are added to C in order. An element's bits depend
   only on its row of A, its column of B and k. Only `dots`, for decoding, sums in another order. With `bf16`, A and
   panels are read as words of rounded numbers: a word holds two values of k in the passes _bf16 and _amx, elsewhere
   one, as float32. Guarded by tests/kernels/gemm.c, tests/kernels/bf16.c, tests/kernels/tiles.c.
   ---------------- */
#ifndef LI_PASS
LI_FN double li_inner(int64_t n, const float *a, int64_t a_step, const float *b, int64_t b_step) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)a[i * a_step] * (double)b[i * b_step];
  return sum;
}
/* Rounds as vcvtneps2bf16 does: to nearest, ties to even. A denormal becomes 0 with its sign; NaN stays NaN. */
LI_HOT float li_bf16_of(float x) {
  if (x != x) return x;
  if (fabsf(x) < FLT_MIN) return x * 0;
  return li_upper(x);
}
LI_FN double li_inner_by(bool bf16, int64_t n, const float *a, int64_t a_step, const float *b, int64_t b_step) {
  double sum = 0;
  if (!bf16) return li_inner(n, a, a_step, b, b_step);
  for (int64_t i = 0; i < n; i++) sum += (double)li_bf16_of(a[i * a_step]) * (double)li_bf16_of(b[i * b_step]);
  return sum;
}

LI_FN void li_gemm_reference(const li_gemm *g) {
  if (LI_HAS_INT8 && g->b_int8) {
    li_int8_reference(g);
    return;
  }
  for (int64_t item = 0; item < g->batch[0] * g->batch[1]; item++) {
    const int64_t x = item / g->batch[1], y = item % g->batch[1], first = x * g->c_batch[0] + y * g->c_batch[1];
    const float *a = g->a + x * g->a_batch[0] + y * g->a_batch[1], *b = g->b + x * g->b_batch[0] + y * g->b_batch[1];
    for (int64_t i = 0; i < g->m; i++)
      for (int64_t j = 0; j < g->n; j++) {
        const int64_t at = first + i * g->c_row + j;
        double sum = (double)g->alpha * li_inner_by(g->bf16, g->k, a + i * g->a_row, g->a_column,
                                                    b + j * g->b_column, g->b_row);
        const double bias = g->bias ? (double)g->bias[j] : 0;
        const double residual = g->residual ? (double)g->residual[at] : 0;
        sum += bias + residual;
        if (g->pre) g->pre[at] = (float)sum;
        g->c[at] = li_activation_scalar(g->activation, (float)sum) + (g->accumulate ? g->c[at] : 0);
      }
  }
}
#endif

#ifdef LI_PASS_PRODUCTS
#undef LI_MR
#undef LI_NV
#undef LI_PAIR
#undef vf_terms
#if LI_IS(avx512) || LI_IS(bf16)
#define LI_MR 14
#define LI_NV 2
#elif LI_IS(avx2)
#define LI_MR 6
#define LI_NV 2
#elif LI_IS(neon)
#define LI_MR 8
#define LI_NV 3
#elif LI_IS(scalar)
#define LI_MR 4
#define LI_NV 4
#else
#define LI_MR 4
#define LI_NV 2
#endif
#define LI_NR (LI_NV * VF)
/* A word holds LI_PAIR values of k, and vf_terms adds the products of two words to a sum. bf16_words packs 2 VF
   consecutive numbers into words; bf16_line pairs VF numbers of x with those of `next`. */
#if LI_IS(bf16)
#define LI_PAIR 2
#define vf_terms(x, panel, sum) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(panel))
#else
#define LI_PAIR 1
#define vf_terms(x, panel, sum) vf_fma(x, panel, sum)
#endif

#ifdef LI_PASS_LOOPS
/* Fills one panel with B's columns. From the first one on, `ahead` columns exist and may be prefetched. A row-major B
   is copied by vectors. For any other B these stores only write the zero padding, before the numbers. */
LI_FN void LI_K(fill_panel)(li_matrix b, int64_t ahead, float *to) {
  const bool whole = b.column == 1;
  const int64_t columns = b.columns, k = b.rows;
  int64_t j = 0, p;
  for (p = 0; (whole || columns < LI_NR) && p < k; p++)
    for (int64_t i = whole ? 0 : columns / VF * VF; i < LI_NR; i += VF)
      vf_store(to + p * LI_NR + i, whole && i < columns ? LI_K(get)(b.at + p * b.row + i, columns - i) : vf_zero());
  if (whole) return;
  if (LI_MR > 1 && b.row == 1)
    for (; j + 4 <= columns; j += 4) {
      const float *x = b.at + j * b.column, *next = x + li_min(4, ahead - 4 - j) * b.column;
      for (p = 0; p + 4 <= k; p += 4) {
        LI_PREFETCH(next + p + (p / 4 & 3) * b.column); /* This prefetches one line per column every 16 k. */
        LI_K(turn4)(x + p, x + p + b.column, x + p + 2 * b.column, x + p + 3 * b.column, to + p * LI_NR + j, LI_NR);
      }
      for (; p < k; p++) {
        for (int64_t i = 0; i < 4; i++) to[p * LI_NR + j + i] = x[p + i * b.column];
      }
    }
  for (p = 0; j < columns && p < k; p++) {
    for (int64_t i = j; i < columns; i++) to[p * LI_NR + i] = b.at[p * b.row + i * b.column];
  }
}
LI_FN void LI_K(fill_panels)(li_matrix b, float *panels) {
  const int64_t n = b.columns, k = b.rows;
  int64_t j = 0;
  while (b.column == 1 && n - j >= LI_NR) { /* Four panels at a time make longer contiguous reads. */
    const int64_t end = j + li_min((n - j) / LI_NR, LI_MR > 1 ? 4 : 1) * LI_NR;
    for (int64_t p = 0; p < k; p++)
      for (int64_t i = j; i < end; i += LI_NR)
        memcpy(panels + i * k + p * LI_NR, b.at + p * b.row + i, LI_NR * sizeof(float));
    j = end;
  }
  for (; j < n; j += LI_NR)
    LI_K(fill_panel)(li_columns(b, j, li_min(n, j + LI_NR)), n - j, panels + j * k);
}

/* Copies up to MR rows of A, LI_KA floats apart, or as [k][MR] if A is column-major. */
LI_FN void LI_K(gather_rows)(li_matrix a, float *to) {
  if (a.column == 1)
    for (int64_t i = 0; i < a.rows; i++) memcpy(to + i * LI_KA, a.at + i * a.row, li_bytes(a.columns));
  else
    for (int64_t p = 0; p < a.columns; p++)
      for (int64_t i = 0; i < a.rows; i++) to[p * LI_MR + i] = a.at[i * a.row + p * a.column];
}
/* Copies whole tiles of a column-major A. Its cache lines are far apart, so each is prefetched and read once. */
LI_FN void LI_K(gather_columns)(int64_t tiles, li_matrix a, float *to) {
  for (int64_t p = 0; p < a.columns; p++, a.at += a.column) {
    const float *coming = a.at + li_min(a.columns - 1 - p, 24) * a.column;
    for (int64_t i = 0; i < tiles * LI_MR; i += 16) LI_PREFETCH(coming + i);
    for (int64_t t = 0; t < tiles; t++)
      memcpy(to + t * LI_MR * LI_KA + p * LI_MR, a.at + t * LI_MR, LI_MR * sizeof(float));
  }
}
#endif

#if LI_IS(bf16)
LI_INLINE vf LI_K(bf16_pair)(vf high, vf low) { return (vf)_mm512_cvtne2ps_pbh(high, low); }
LI_INLINE vf LI_K(bf16_words)(const float *p) { return LI_K(bf16_pair)(vf_load(p + VF), vf_load(p)); }
/* Word 2 i is x_i, word 2 i + 1 next_i. */
LI_INLINE vf LI_K(bf16_line)(vf x, vf next) {
  const __m512i order = _mm512_add_epi32(_mm512_set1_epi32(16 << 16), _mm512_mullo_epi32(_mm512_set1_epi32(0x10001),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  return (vf)_mm512_permutexvar_epi16(order, (__m512i)LI_K(bf16_pair)(next, x));
}
/* Packs n numbers, `step` floats apart, into words, zero padded to whole vectors. */
LI_FN void LI_K(bf16_run)(int64_t n, const float *x, int64_t step, float *to) {
  float part[2 * VF];
  for (int64_t left = n; left > 0; left -= 2 * VF, x += 2 * VF * step, to += VF) {
    const bool some = left < 2 * VF;
    if (some) memset(part, 0, sizeof part);
    if (some || step != 1)
      for (int64_t i = 0; i < li_min(left, 2 * VF); i++) part[i] = x[i * step];
    vf_store(to, LI_K(bf16_words)(some || step != 1 ? part : x));
  }
}
/* Packs k rows of `parts` times `width` columns into lines of words: line i of a part at i * line, parts `step`
   apart. */
LI_INLINE void LI_K(bf16_lines)(int64_t parts, int64_t width, int64_t k, const float *x, int64_t row, float *to,
                                int64_t line, int64_t step) {
  for (; k > 0; k -= 2, x += 2 * row, to += line)
    for (int64_t t = 0; t < parts; t++)
      for (int64_t i = 0; i < width; i += VF) {
        const float *at = x + t * width + i;
        const vf next = k > 1 ? LI_K(get)(at + row, width - i) : vf_zero();
        LI_K(put)(to + t * step + i, LI_K(bf16_line)(LI_K(get)(at, width - i), next), width - i);
      }
}

LI_FN void LI_K(bf16_panels)(li_matrix b, float *panels) {
  const int64_t n = b.columns, k = b.rows, size = li_divide_up(k, 2) * LI_NR;
  int64_t j = 0;
  float words[LI_NR * VF];
  for (int64_t some; b.column == 1 && n - j >= LI_NR; j += some * LI_NR, panels += some * size) {
    some = li_min((n - j) / LI_NR, 4);
    LI_K(bf16_lines)(some, LI_NR, k, b.at + j, b.row, panels, LI_NR, size);
  }
  for (; j < n; j += LI_NR, panels += size) {
    const int64_t columns = li_min(n - j, LI_NR);
    for (int64_t p = 0; p < k; p += 2 * VF) {
      const int64_t terms = li_min(k - p, 2 * VF);
      const li_matrix turned = { words, li_divide_up(terms, 2), columns, 1, VF };
      for (int64_t i = 0; i < columns; i++)
        LI_K(bf16_run)(terms, b.at + p * b.row + (j + i) * b.column, b.row, words + i * VF);
      LI_G(fill_panel)(turned, columns, panels + p / 2 * LI_NR);
    }
  }
}
LI_INLINE li_matrix LI_K(tile_a)(bool words, li_matrix a, int64_t row, int64_t rows, float *to) {
  const int64_t place = row / LI_MR % LI_WORDS_ABREAST, whole = (a.rows - row) / LI_MR, k = a.columns;
  (void)words;
  a.at += row * a.row;
  if (a.column == 1 || a.row != 1) {
    for (int64_t i = 0; i < rows; i++) LI_K(bf16_run)(k, a.at + i * a.row, a.column, to + i * LI_KA);
    return li_strided(to, rows, k, LI_KA);
  }
  if (rows < LI_MR) LI_K(bf16_lines)(1, rows, k, a.at, a.column, to, LI_MR, 0);
  else if (place == 0)
    LI_K(bf16_lines)(li_min(whole, LI_WORDS_ABREAST), LI_MR, k, a.at, a.column, to, LI_MR, LI_MR * LI_KA);
  a.at = to + (rows < LI_MR ? 0 : place * LI_MR * LI_KA);
  a.column = LI_MR;
  return a;
}
#elif !defined(LUNA_NO_BF16)
/* Without vdpbf16ps a word is one rounded number: bf16_panels and tile_a round their copies. */
LI_FN void LI_K(bf16_round)(int64_t rows, int64_t n, float *x, int64_t row) {
  for (; rows > 0; rows--, x += row)
    for (int64_t i = 0; i < n; i += VF) {
      const vf v = LI_K(get)(x + i, n - i), tiny = vf_mul(v, vf_zero());
      const vf normal = vf_select(vf_lt(vf_abs(v), vf_set(FLT_MIN)), tiny, LI_K(upper)(v));
      LI_K(put)(x + i, vf_select(vf_le(v, v), normal, v), n - i);
    }
}
LI_FN void LI_K(bf16_panels)(li_matrix b, float *panels) {
  LI_K(fill_panels)(b, panels);
  LI_K(bf16_round)(li_divide_up(b.columns, LI_NR) * b.rows, LI_NR, panels, LI_NR);
}
#endif

/* Computes a tile of `rows` by `vectors` vectors, both constants in every call below. gcc keeps an array in registers
   only if every index is a constant, so all loops are unrolled. Every third row of A has a pointer, since an x86
   address adds one or two strides at no cost. */
LI_INLINE void LI_K(tile_rows)(int rows, int vectors, int64_t k, li_matrix a, const float *b, int64_t b_row,
                               const li_epilogue *e) {
  vf sum[2 * LI_MR][LI_NV], panel[LI_NV];
  const float *at[2 * LI_MR / 3 + 1];
  LI_UNROLL
  for (int i = 0; i < rows; i++) {
    if (i % 3 == 0) at[i / 3] = a.at + i * a.row;
    LI_UNROLL
    for (int j = 0; j < vectors; j++) sum[i][j] = vf_zero();
    LI_PREFETCH(e->c + i * e->c_row);
    LI_PREFETCH(e->c + i * e->c_row + LI_NR - 1);
  }
  for (; k > 0; k--, b += b_row) {
    LI_UNROLL
    for (int j = 0; j < vectors; j++) panel[j] = vf_load(b + j * VF);
    LI_UNROLL
    for (int i = 0; i < rows; i++) {
      const vf x = vf_set(at[i / 3][i % 3 * a.row]);
      LI_UNROLL
      for (int j = 0; j < vectors; j++) sum[i][j] = vf_terms(x, panel[j], sum[i][j]);
    }
    LI_UNROLL
    for (int i = 0; i < rows; i += 3) at[i / 3] += a.column;
  }
  const vf scale = vf_set(e->alpha), lowest = vf_set(e->lowest);
  const float *from = e->from;
  float *c = e->c;
  if (vectors > 1) LI_HIDE(c); /* Else all rows' addresses would stay in registers during the loop. */
  LI_UNROLL
  for (int j = 0; j < vectors; j++) panel[j] = e->bias ? vf_load(e->bias + j * VF) : vf_zero();
  LI_UNROLL
  for (int i = 0; i < rows; i++) {
    LI_UNROLL
    for (int j = 0; j < vectors; j++) {
      const vf v = vf_add(vf_load(from + j * VF), vf_mul(scale, sum[i][j]));
      vf_store(c + j * VF, vf_max(lowest, vf_add(v, panel[j])));
    }
    c += e->c_row;
    from += e->from_row;
  }
}
/* A tile of less than four rows waits for its own sums. So the next one has MR of the `left` rows if that leaves none
   or more than 2, else 8, 4, 3, 2 or 1. If at most half a panel exists, it has twice MR rows by one vector. */
LI_INLINE int64_t LI_K(tile_height)(int64_t left, bool half) {
  if (half && left >= 2 * LI_MR) return 2 * LI_MR;
  if (left == LI_MR || left > LI_MR + 2 || LI_MR == 1) return LI_MR;
  if (LI_MR > 8 && left >= 8) return 8;
  if (LI_MR > 4 && left >= 4) return 4;
  return li_min(left, 3);
}
LI_INLINE void LI_K(tile)(int64_t rows, int64_t k, li_matrix a, const float *b, int64_t b_row, const li_epilogue *e) {
  if (rows == LI_MR) LI_K(tile_rows)(LI_MR, LI_NV, k, a, b, b_row, e);
  else if (LI_NV == 2 && !LI_IS(bf16) && rows == 2 * LI_MR) LI_K(tile_rows)(2 * LI_MR, 1, k, a, b, b_row, e);
  else if (LI_MR > 8 && rows == 8) LI_K(tile_rows)(8, LI_NV, k, a, b, b_row, e);
  else if (LI_MR > 4 && rows == 4) LI_K(tile_rows)(4, LI_NV, k, a, b, b_row, e);
  else if (LI_MR > 1 && rows == 3) LI_K(tile_rows)(3, LI_NV, k, a, b, b_row, e);
  else if (LI_MR > 1 && rows == 2) LI_K(tile_rows)(2, LI_NV, k, a, b, b_row, e);
  else LI_K(tile_rows)(1, LI_NV, k, a, b, b_row, e);
}

#ifdef LI_PASS_LOOPS
/* Does what a tile's epilogue cannot: edges, activations other than ReLU, and two results. `tile` is [rows, NR]. */
LI_FN void LI_K(finish_tile)(const li_target *t, int64_t i, int64_t j, int64_t rows, int64_t columns, float *tile) {
  const int64_t sum_at = i * t->sum_row + j, from_at = i * t->from_row + j, c_at = i * t->c_row + j;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t l = 0; l < columns; l += VF) {
      const int64_t left = columns - l;
      vf v = vf_load(tile + r * LI_NR + l);
      if (t->from) v = vf_add(LI_K(get)(t->from + from_at + r * t->from_row + l, left), v);
      if (t->finish && t->bias) v = vf_add(v, LI_K(get)(t->bias + j + l, left));
      if (t->finish && t->pre) LI_K(put)(t->pre + c_at + r * t->c_row + l, v, left);
      if (t->finish) vf_store(tile + r * LI_NR + l, v);
      else LI_K(put)(t->sum + sum_at + r * t->sum_row + l, v, left);
    }
  if (!t->finish) return;
  if (t->activation != LI_NO_ACTIVATION) LI_K(activate)(t->activation, rows * LI_NR, tile, tile);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t l = 0; l < columns; l += VF) {
      float *c = t->c + c_at + r * t->c_row + l;
      const vf v = vf_load(tile + r * LI_NR + l);
      LI_K(put)(c, t->late ? vf_add(v, LI_K(get)(c, columns - l)) : v, columns - l);
    }
}
#endif

/* Returns the epilogue of the tile at (row, j). It writes to C or, unless null, to the buffer `edge`. */
LI_INLINE li_epilogue LI_K(epilogue_of)(const li_target *t, int64_t row, int64_t j, float *edge) {
  li_epilogue e = { NULL, li_nothing, edge, 0, LI_NR, t->alpha, -INFINITY };
  if (edge) return e;
  e.c = t->sum + row * t->sum_row + j;
  e.c_row = t->sum_row;
  if (t->finish && t->bias) e.bias = t->bias + j;
  if (t->finish && t->activation == LUNA_ACTIVATION_RELU) e.lowest = 0;
  if (t->from) {
    e.from = t->from + row * t->from_row + j;
    e.from_row = t->from_row;
  }
  return e;
}

#ifdef LI_PASS_LOOPS
/* Returns the rows of A for the tile at `row`. They are copied to `room` unless that is null, several tiles at a time
   if A is column-major. With `words` the copies are rounded. */
LI_INLINE li_matrix LI_K(tile_a)(bool words, li_matrix a, int64_t row, int64_t rows, float *room) {
  const int64_t abreast = words ? LI_WORDS_ABREAST : LI_TILES_ABREAST, place = row / LI_MR % abreast;
  const int64_t whole = (a.rows - row) / LI_MR;
  a = li_lines(a, row, row + rows);
  if (LI_MR == 1 || !room) return a;
  if (a.column != 1 && a.row == 1 && rows == LI_MR) {
    if (place == 0) LI_K(gather_columns)(li_min(whole, abreast), a, room);
    room += place * LI_MR * LI_KA;
  } else LI_K(gather_rows)(a, room);
#ifndef LUNA_NO_BF16
  if (words && a.column == 1) LI_K(bf16_round)(rows, a.columns, room, LI_KA);
  else if (words) LI_K(bf16_round)(a.columns, rows, room, LI_MR);
#endif
  a.at = room;
  a.row = a.column == 1 ? LI_KA : 1;
  if (a.column != 1) a.column = LI_MR;
  return a;
}
#endif

/* C (+)= alpha A B for the rows of A and the panels of a block. A tile's rows stay in L1 while the panels stream from
   L2 and the next tile's rows are prefetched. C is accessed row by row. */
LI_FN void LI_K(panels)(li_matrix a, li_panels b, const li_target *t) {
  const bool plain = t->activation == LI_NO_ACTIVATION || t->activation == LUNA_ACTIVATION_RELU;
  const bool simple = !t->finish || (!t->pre && !t->late && plain);
  const bool words = LI_IS(bf16) || LI_BF16(t), half = b.n <= VF && LI_NV == 2 && !words;
  const int64_t all = li_divide_up(b.n, LI_NR), lines = li_divide_up(a.columns, LI_PAIR);
  float edge[2 * LI_MR * LI_NR];
  if (half) b.words = NULL; /* It has room for MR rows only. */
  for (int64_t row = 0, rows; row < a.rows; row += rows) {
    const float *panel = b.at;
    rows = LI_K(tile_height)(a.rows - row, half);
    const li_matrix at = LI_K(tile_a)(words, a, row, rows, b.words);
    const float *next = a.at + (row + rows) * a.row;
    const int64_t coming = half ? 0 : li_min(rows, a.rows - row - rows);
    const int64_t width = rows > LI_MR ? VF : LI_NR;
    for (int64_t j = 0; j < b.n; j += LI_NR, panel += b.step) {
      const int64_t columns = li_min(b.n - j, LI_NR);
      if (LI_MR > 1 && a.column == 1)
        for (int64_t p = j / LI_NR; p < coming; p += all)
          for (int64_t x = 0; x < a.columns; x += 16) LI_PREFETCH(next + p * a.row + x);
      li_epilogue e = LI_K(epilogue_of)(t, row, j, simple && columns == width ? NULL : edge);
      LI_K(tile)(rows, lines, at, panel, b.row, &e);
      if (e.c == edge) LI_G(finish_tile)(t, row, j, rows, columns, edge);
    }
  }
}
#ifdef LI_PASS_LOOPS
static const li_products LI_K(float_products) = { 1, LI_MR, 0, LI_K(fill_panels), LI_K(panels), NULL };
#endif
#ifndef LUNA_NO_BF16
static const li_products LI_K(word_products) = { LI_PAIR, LI_MR, 0, LI_K(bf16_panels), LI_K(panels), NULL };
#endif
#endif

#ifdef LI_PASS_TILES
/* ---- bfloat16 products by AMX: a tile register has 16 lines of 16 words. Tiles 0 to 3 hold a 32 by 32 block of C, 4
   and 5 rows of A, 6 and 7 lines of a panel. For each block of 32 k, the even and the odd k have a sum of 16 terms
   each, in order from 0; one is added to the other, and the result to C's. ---- */
#define LI_WA (LI_KC / 2 + 16) /* This row stride is whole cache lines, but no power of two. */
/* In gcc, AMX intrinsics do not declare all the memory they access. */
#define LI_MEMORY __asm__ volatile("" ::: "memory")
LI_INLINE void tile_start(void) {
  static const struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t lines[16]; } tiles = {
    1, 0, { 0 }, { 64, 64, 64, 64, 64, 64, 64, 64 }, { 16, 16, 16, 16, 16, 16, 16, 16 }
  };
  LI_MEMORY;
  _tile_loadconfig(&tiles);
}

#define turn_quarters(x, y, which) LI_MZ(0xFFFF, shuffle_f32x4, x, y, which)
LI_INLINE void LI_K(turn16)(vf *x, float *to, int64_t step) {
  vf y[16];
  LI_UNROLL
  for (int i = 0; i < 16; i += 2) {
    y[i] = LI_MZ(0xFFFF, unpacklo_ps, x[i], x[i + 1]);
    y[i + 1] = LI_MZ(0xFFFF, unpackhi_ps, x[i], x[i + 1]);
  }
  LI_UNROLL
  for (int i = 0; i < 16; i += 4) {
    LI_UNROLL
    for (int h = 0; h < 2; h++) {
      const __m512d low = _mm512_castps_pd(y[i + h]), high = _mm512_castps_pd(y[i + h + 2]);
      x[i + 2 * h] = _mm512_castpd_ps(LI_MZ(0xFF, unpacklo_pd, low, high));
      x[i + 2 * h + 1] = _mm512_castpd_ps(LI_MZ(0xFF, unpackhi_pd, low, high));
    }
  }
  LI_UNROLL
  for (int i = 0; i < 4; i++) { /* Column 4 q + i of lines 0 to 15 is in quarter q of x[i], x[4 + i], ... */
    const vf a = turn_quarters(x[i], x[4 + i], 0x88), b = turn_quarters(x[i], x[4 + i], 0xDD);
    const vf c = turn_quarters(x[8 + i], x[12 + i], 0x88), d = turn_quarters(x[8 + i], x[12 + i], 0xDD);
    vf_store(to + i * step, turn_quarters(a, c, 0x88));
    vf_store(to + (i + 4) * step, turn_quarters(b, d, 0x88));
    vf_store(to + (i + 8) * step, turn_quarters(a, c, 0xDD));
    vf_store(to + (i + 12) * step, turn_quarters(b, d, 0xDD));
  }
}
/* Returns 16 words, each of two rows' values in one column. Rows hold floats or, if `words`, bfloat16. `left` rows
   exist. */
LI_INLINE vf LI_K(tile_line)(bool words, int64_t left, const float *at, int64_t row, int64_t columns) {
  if (left <= 0) return vf_zero();
  if (!words)
    return li_bf16_line_bf16(LI_K(get)(at, columns), left > 1 ? LI_K(get)(at + row, columns) : vf_zero());
  const __m512i first = _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256((const __m256i *)(const void *)at));
  if (left == 1) return (vf)first;
  const __m256i after = _mm256_loadu_si256((const __m256i *)(const void *)(at + row));
  const __m512i next = LI_MZ(0xFFFF, cvtepu16_epi32, after);
  return (vf)_mm512_or_si512(first, _mm512_maskz_slli_epi32(0xFFFF, next, 16));
}
/* Copies rows of A as words, zero padded to whole blocks of 32 k. */
LI_FN void LI_K(gather)(bool words, li_matrix a, float *to) {
  if (a.row != 1 || a.column == 1) {
    for (int64_t i = 0; i < a.rows; i++) li_bf16_run_bf16(a.columns, a.at + i * a.row, a.column, to + i * LI_WA);
    return;
  }
  for (int64_t p = 0; p < a.columns; p += 32, to += 16)
    for (int64_t i = 0; i < a.rows; i += 16) {
      const float *at = a.at + p * a.column + (words ? i / 2 : i);
      vf lines[16];
      LI_UNROLL
      for (int q = 0; q < 16; q++)
        lines[q] = LI_K(tile_line)(words, a.columns - p - 2 * q, at + 2 * q * a.column, a.column, a.rows - i);
      LI_K(turn16)(lines, to + i * LI_WA, LI_WA);
    }
}
LI_FN void LI_K(word_panels)(li_matrix b, float *panels) {
  for (int64_t j = 0; j < b.columns; j += 32)
    for (int64_t p = 0; p < b.rows; p += 2, panels += 32)
      for (int64_t i = 0; i < 32; i += 16)
        vf_store(panels + i, LI_K(tile_line)(true, b.rows - p, b.at + p * b.row + (j + i) / 2, b.row, 16));
}

/* The state of a product by tiles, for all its blocks. Sums start from `from`, in rows of from_row: what is added, the
   bias, or zeros. If `direct`, the sums are the result. Otherwise a block goes through a buffer, and its epilogue runs
   beside the next block's products; `late` of its rows are left. */
typedef struct li_tile_work {
  const li_target *t;
  const float *from;
  int64_t from_row, a_row, k; /* a_row, k: words */
  bool simple, direct;
  vf scale, lowest;
  int64_t late, late_row, late_j, late_columns[2];
  const float *late_at;
  vf late_bias[2], late_sums[2];
  const float *bias, *added;  /* The epilogue's, or null */
  /* `coming` vectors of A's next rows are not yet words; a step packs `share`. A row has `across` vectors. */
  const float *coming_a;
  float *coming_words;
  int64_t coming, share, line, across, gap, ahead;
} li_tile_work;
/* Packs up to `count` more vectors of A's next rows, amid a block's products. */
LI_INLINE void LI_K(tile_coming)(li_tile_work *w, int64_t count) {
  for (count = li_min(count, w->coming), w->coming -= count; count > 0; count--, w->coming_a += 2 * VF) {
    _mm_prefetch((const char *)(w->coming_a + w->ahead), _MM_HINT_T0);
    _mm_prefetch((const char *)(w->coming_a + w->ahead + VF), _MM_HINT_T0);
    vf_store(w->coming_words, li_bf16_words_bf16(w->coming_a));
    w->coming_words += VF;
    if (++w->line < w->across) continue;
    w->line = 0;
    w->coming_words += LI_WA - w->across * VF;
    w->coming_a += w->gap;
  }
}
/* Writes 32 numbers of C as words. In a ReLU's backward, t->slope has the ReLU's words: a number is 0 unless the ReLU's
   is positive, and a block's last row writes the sums of the block's columns. */
LI_INLINE void LI_K(tile_words_out)(li_tile_work *w, vf *v) {
  const li_target *t = w->t;
  const int64_t at = w->late_row * t->words_row + w->late_j / 2;
  if (t->slope) {
    const uint32_t positive = _mm512_cmpgt_epi16_mask((__m512i)vf_load(t->slope + at), _mm512_setzero_si512());
    for (int l = 0; l < 2; l++) {
      v[l] = _mm512_maskz_mov_ps((__mmask16)(positive >> 16 * l), v[l]);
      w->late_sums[l] = vf_add(w->late_sums[l], v[l]);
    }
    if (w->late == 1)
      for (int l = 0; l < 2; l++)
        vf_store(t->sums + w->late_row / 32 * t->sums_row + w->late_j + 16 * l, w->late_sums[l]);
  }
  vf_store(t->words + at, li_bf16_pair_bf16(v[1], v[0]));
}

/* Runs the epilogue of up to `rows` rows of the previous block. */
LI_INLINE void LI_K(tile_late)(li_tile_work *w, int64_t rows) {
  const li_target *t = w->t;
  for (rows = li_min(rows, w->late); rows > 0; rows--, w->late--, w->late_row++, w->late_at += 32) {
    const float *added = li_from(w->added, w->late_row * t->from_row + w->late_j);
    float *c = t->sum + w->late_row * t->sum_row + w->late_j;
    vf v[2];
    LI_UNROLL
    for (int l = 0; l < 2; l++) {
      v[l] = vf_fma(w->scale, vf_load(w->late_at + 16 * l), w->late_bias[l]);
      if (added) v[l] = vf_add(vf_load_part(added + 16 * l, w->late_columns[l]), v[l]);
      v[l] = vf_max(w->lowest, v[l]);
    }
    if (t->finish && t->words) {
      LI_K(tile_words_out)(w, v);
      continue;
    }
    vf_store_part(c, v[0], w->late_columns[0]);
    vf_store_part(c + 16, v[1], w->late_columns[1]);
  }
}
LI_INLINE void LI_K(tile_sums_load)(const float *from, int64_t step) {
  if (!from) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, from, 4 * step);
  _tile_loadd(1, from + 16, 4 * step);
  _tile_loadd(2, from + 16 * step, 4 * step);
  _tile_loadd(3, from + 16 * step + 16, 4 * step);
}
LI_INLINE void LI_K(tile_sums_store)(float *to, int64_t step) {
  _tile_stored(0, to, 4 * step);
  _tile_stored(1, to + 16, 4 * step);
  _tile_stored(2, to + 16 * step, 4 * step);
  _tile_stored(3, to + 16 * step + 16, 4 * step);
  LI_MEMORY;
}

/* Prefetches four rows of the block at (row, j): of C, or of its words and their slope. */
LI_INLINE void LI_K(tile_ahead)(const li_target *t, int64_t row, int64_t j) {
  for (const int64_t end = row + 4; row < end; row++) {
    const int64_t at = row * t->words_row + j / 2;
    const float *c = t->sum + row * t->sum_row + j, *more = c + 16;
    if (t->words) c = t->words + at;
    if (t->words) more = t->slope ? t->slope + at : c;
    _mm_prefetch((const char *)c, _MM_HINT_T1);
    _mm_prefetch((const char *)more, _MM_HINT_T1);
  }
}

/* Computes the block of rows x columns at (row, j) of C, both at most 32. a holds words, b whole blocks of lines, and
   tail the last, partial block. */
LI_INLINE void LI_K(tile_block)(li_tile_work *w, int64_t row, int64_t j, int64_t rows, int64_t columns,
                                const float *a, const float *b, const float *tail, float *edge) {
  const li_target *t = w->t;
  const bool tall = rows > 16, wide = columns > 16, whole = rows == 32 && columns == 32;
  const float *from = li_from(w->from, row * w->from_row + j);
  float *const c = t->sum + row * t->sum_row + j, *const to = w->direct && whole ? c : edge;
  int64_t step = w->from_row, next = row;
  if (from && !whole) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t l = 0; l < 32; l += VF)
        vf_store(edge + r * 32 + l, l < columns ? LI_K(get)(from + r * step + l, columns - l) : vf_zero());
    from = edge, step = 32;
  }
  LI_MEMORY;
  LI_K(tile_sums_load)(from, step);
  for (int64_t p = 0; p < w->k; p += 16, a += 16, b += 16 * 32) {
    if (p + 16 > w->k) b = tail;
    _tile_loadd(4, a, 4 * w->a_row);
    _tile_loadd(6, b, 128);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
      _tile_loadd(7, b + 16, 128);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (w->late) LI_K(tile_late)(w, 4);
    if (next < row + 32) LI_K(tile_ahead)(t, next, j + 32);
    next += 4;
    if (w->coming) LI_K(tile_coming)(w, w->share);
    if (tall) {
      _tile_loadd(5, a + 16 * w->a_row, 4 * w->a_row);
      _tile_dpbf16ps(2, 5, 6);
      if (wide) _tile_dpbf16ps(3, 5, 7);
    }
  }
  LI_K(tile_late)(w, w->late);
  LI_K(tile_sums_store)(to, to == edge ? 32 : t->sum_row);
  if (to != edge) return;
  if (!w->simple) {
    for (int64_t i = 0; t->alpha != 1 && i < rows * 32; i += VF)
      vf_store(edge + i, vf_mul(w->scale, vf_load(edge + i)));
    li_finish_tile_avx512(t, row, j, rows, columns, edge);
    return;
  }
  w->late = rows;
  w->late_row = row;
  w->late_j = j;
  w->late_at = edge;
  for (int l = 0; l < 2; l++) {
    w->late_columns[l] = li_max(0, li_min(16, columns - 16 * l));
    w->late_bias[l] = w->bias ? vf_load_part(w->bias + j + 16 * l, w->late_columns[l]) : vf_set(-0.0f);
    w->late_sums[l] = vf_zero();
  }
}

LI_FN void LI_K(panels)(li_matrix a, li_panels b, const li_target *t) {
  const bool relu = t->finish && t->activation == LUNA_ACTIVATION_RELU, first = t->alpha == 1;
  const bool plain = t->activation == LI_NO_ACTIVATION || t->activation == LUNA_ACTIVATION_RELU;
  const float *const bias = t->finish ? t->bias : NULL;
  const int64_t k = a.columns, lines = li_divide_up(k, 2), whole = lines / 16 * 16, some = lines - whole;
  const bool ready = t->a_words && a.column == 1;
  const bool dense = !ready && a.column == 1 && k > 0 && k % 32 == 0 && b.n > 0;
  float memory[3 * 32 * 32];
  float *words = b.words, *edge = memory + (16 - (uintptr_t)memory / 4 % 16) % 16, *const tail = edge + 2 * 32 * 32;
  li_tile_work w;
  memset(&w, 0, sizeof w);
  w.t = t;
  w.k = lines;
  w.a_row = ready ? a.row : LI_WA;
  w.simple = !t->finish || (!t->pre && !t->late && plain);
  w.from = NULL;
  if (first && w.simple) w.from = t->from ? t->from : bias;
  w.from_row = t->from ? t->from_row : 0;
  w.bias = w.from == bias ? NULL : bias;
  w.added = w.from == t->from ? NULL : t->from;
  w.direct = w.simple && first && !relu && !w.bias && !(t->finish && t->words);
  w.scale = vf_set(t->alpha);
  w.lowest = vf_set(relu ? 0 : -INFINITY);
  memset(tail + some * 32, 0, (size_t)(16 - some) * 32 * sizeof(float) * (some > 0));
  w.across = k / 32;
  w.gap = a.row - k;
  w.ahead = a.row;
  w.share = li_divide_up(32 * 32, b.n);
  tile_start();
  for (int64_t row = 0, rows; row < a.rows; row += rows) {
    const float *panel = b.at;
    rows = li_min(a.rows - row, 32);
    const li_matrix some_rows = {
      a.at + (t->a_words && !ready ? row / 2 : row * a.row), rows, k, a.row, a.column
    };
    if (!ready && (!dense || row == 0)) LI_K(gather)(t->a_words, some_rows, words);
    if (dense) {
      LI_K(tile_coming)(&w, w.coming);
      if (row > 0) words += row % 64 ? 32 * LI_WA : -32 * LI_WA;
      w.coming = li_min(a.rows - row - rows, 32) * w.across;
      w.coming_a = some_rows.at + rows * a.row;
      w.coming_words = words + (row % 64 ? -32 : 32) * LI_WA;
      w.line = 0;
    }
    for (int64_t j = 0; j < b.n; j += 32, panel += b.step) {
      if (some) memcpy(tail, panel + whole * 32, (size_t)some * 32 * sizeof(float));
      LI_K(tile_block)(&w, row, j, rows, li_min(b.n - j, 32), ready ? some_rows.at : words, panel, tail, edge);
      if (w.late) edge = tail - (tail - edge == 1024 ? 2048 : 1024);
    }
  }
  LI_K(tile_late)(&w, w.late);
  _tile_release();
}
static const li_products LI_K(word_products) = {
  2, 32, 2 * 32 * LI_WA, li_bf16_panels_bf16, LI_K(panels), LI_K(word_panels)
};
#ifndef LUNA_NO_INT8
/* A block's sums become floats beside the next block's products; `left` of its rows remain. */
typedef struct li_int8_late { const li_int8_block *b; const float *sums; int64_t row, j, left; } li_int8_late;
LI_INLINE void LI_K(int8_late)(li_int8_late *w, int64_t rows) {
  for (rows = li_min(rows, w->left); rows > 0; rows--, w->left--, w->row++, w->sums += 32)
    li_int8_finish_vnni(w->b, (const int32_t *)(const void *)w->sums, w->row, w->j, li_min(32, w->b->n - w->j));
}
/* This is int8_rows by tiles, for whole blocks: vpdpbusd's integers and panels have a tile's layout. What A has after k
   meets zeros. */
LI_FN void LI_K(int8_rows)(const li_int8_block *b) {
  const int64_t lines = li_divide_up(b->k, 4), whole = lines / 16 * 16, tall = b->w ? 0 : b->m / 32 * 32;
  float memory[2 * 32 * 32 + 16 * 32 + 16];
  float *out = memory + (16 - (uintptr_t)memory / 4 % 16) % 16, *const tail = out + 2 * 32 * 32;
  li_int8_late late = { b, out, 0, 0, 0 };
  li_int8_block rest = *b;
  memset(tail, 0, 16 * 128);
  if (tall > 0) tile_start();
  for (int64_t row = 0; row < tall; row += 32)
    for (int64_t j = 0; j < b->n; j += 32) {
      const char *q = b->q + row * b->q_row, *panel = b->panels + j * lines * 4;
      if (whole < lines) memcpy(tail, panel + whole * 128, (size_t)(lines - whole) * 128);
      LI_MEMORY;
      LI_K(tile_sums_load)(NULL, 0);
      for (int64_t p = 0; p < lines; p += 16, q += 64, panel += 16 * 128) {
        if (p == whole) panel = (const char *)tail;
        _tile_loadd(4, q, b->q_row);
        _tile_loadd(6, panel, 128);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, panel + 64, 128);
        _tile_dpbusd(1, 4, 7);
        LI_K(int8_late)(&late, li_divide_up(512, lines));
        _tile_loadd(5, q + 16 * b->q_row, b->q_row);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      }
      LI_K(int8_late)(&late, late.left);
      LI_K(tile_sums_store)(out, 32);
      late.sums = out;
      late.row = row;
      late.j = j;
      late.left = 32;
      out = tail - (tail - out == 1024 ? 2048 : 1024);
    }
  LI_K(int8_late)(&late, late.left);
  if (tall > 0) _tile_release();
  rest.m -= tall;
  rest.q += tall * b->q_row;
  rest.q_scale += tall;
  rest.c += tall * b->c_row;
  rest.residual = li_from(b->residual, tall * b->c_row);
  li_int8_rows_vnni(&rest);
}
static const li_int8_loops LI_K(int8_loops) = {
  32, INT64_MAX, 32, 4, 1, li_int8_quantize_vnni, li_int8_panels_vnni, LI_K(int8_rows)
};
#endif
#endif

#ifdef LI_PASS_LOOPS

/* Multiplies few rows by the transpose of a row-major matrix, such as a linear layer's weight in decoding. Each element
   is a dot product by lanes, so the matrix is read once, in order, at memory bandwidth. */
LI_INLINE vf LI_K(dot_lanes)(bool whole, int64_t k, const float *a, const float *b) {
  vf sum0 = vf_zero(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t p = 0;
  for (; p + 4 * VF <= k; p += 4 * VF) {
    sum0 = vf_fma(vf_load(a + p), vf_load(b + p), sum0);
    sum1 = vf_fma(vf_load(a + p + VF), vf_load(b + p + VF), sum1);
    sum2 = vf_fma(vf_load(a + p + 2 * VF), vf_load(b + p + 2 * VF), sum2);
    sum3 = vf_fma(vf_load(a + p + 3 * VF), vf_load(b + p + 3 * VF), sum3);
  }
  for (; p < k && !whole; p += VF) sum0 = vf_fma(LI_K(get)(a + p, k - p), LI_K(get)(b + p, k - p), sum0);
  return vf_add(vf_add(sum0, sum1), vf_add(sum2, sum3));
}
/* Computes n <= NR dot products. A single load instruction reads all columns, since hardware prefetchers track its
   address. */
LI_INLINE void LI_K(dots)(bool whole, int64_t n, int64_t k, const float *a, const float *b, int64_t b_column,
                          float alpha, float *out) {
  vf dot[LI_NR];
  int64_t i;
  for (i = 0; i < n; i++, b += b_column) dot[i] = LI_K(dot_lanes)(whole, k, a, b);
  for (; i % 4; i++) dot[i] = vf_zero();
  for (i = 0; i < n; i += 4) LI_K(sum4)(dot + i, alpha, out + i);
}

LI_FN void LI_K(dot_rows)(li_matrix a, li_matrix b, const li_target *t) {
  const int64_t m = a.rows, n = b.columns, k = a.columns;
  const int64_t group = m > 1 ? 4 : LI_NR; /* These columns stay in L1 for several rows. */
  float edge[4 * LI_NR];
  if (n % VF) memset(edge, 0, sizeof edge); /* All lanes of a vector are read. */
  for (int64_t j = 0; j < n; j += LI_NR)
    for (int64_t i = 0; i < m; i += 4) {
      const int64_t columns = li_min(n - j, LI_NR), rows = li_min(m - i, 4);
      const float *x = a.at + i * a.row, *y = b.at + j * b.column;
      for (int64_t l = 0; l < columns; l += group)
        for (int64_t r = 0; r < rows; r++) {
          const int64_t count = li_min(columns - l, group);
          float *to = edge + r * LI_NR + l;
          if (VF > 1 && k % (4 * VF) == 0)
            LI_K(dots)(true, count, k, x + r * a.row, y + l * b.column, b.column, t->alpha, to);
          else LI_K(dots)(false, count, k, x + r * a.row, y + l * b.column, b.column, t->alpha, to);
        }
      LI_K(finish_tile)(t, i, j, rows, columns, edge);
    }
}

#elif !defined(LI_PASS)

/* ---- GEMM's driver: A [m, k], B [k, n] -> C [m, n] ---- */
LI_HOT int64_t li_panels_size(const li_kernels *kernels, int64_t n, int64_t k) {
  return li_divide_up(n, kernels->nr) * kernels->nr * k;
}

LI_INLINE const li_products *li_products_of(const li_kernels *kernels, bool bf16) {
  if (bf16) return kernels->words;
  return kernels->panels;
}
/* Returns the floats of room for the rows of A that a product holds as words. Without `room` it holds one tile's, or
   several tiles' of a column-major A. */
LI_HOT int64_t li_words_size(const li_kernels *kernels, bool column_major) {
  if (kernels->words->room) return kernels->words->room;
  return kernels->mr * LI_KA * (column_major ? LI_WORDS_ABREAST : 1);
}
LI_HOT li_panels li_words_in(const li_kernels *kernels, const float *at, int64_t n, int64_t k, float *words) {
  const int64_t rows = li_divide_up(k, li_products_of(kernels, words != NULL)->pair);
  const li_panels b = { at, n, kernels->nr * rows, kernels->nr, words };
  return b;
}
LI_HOT li_panels li_words_of(const li_kernels *kernels, li_matrix b, float *room, float *words) {
  li_products_of(kernels, words != NULL)->fill_panels(b, room);
  return li_words_in(kernels, room, b.columns, b.rows, words);
}

/* C = alpha A B (+ C), with B in panels. */
LI_HOT void li_matmul_panels(const li_kernels *kernels, float alpha, li_matrix a, li_panels b, li_out c) {
  const li_products *products = li_products_of(kernels, b.words != NULL);
  const float *panels = b.at;
  li_target t;
  int64_t p = 0;
  memset(&t, 0, sizeof t);
  t.sum = c.at;
  t.sum_row = t.from_row = c.row;
  t.alpha = alpha;
  t.from = c.add ? c.at : NULL;
  t.bf16 = b.words != NULL;
  do {
    b.at = panels + p / products->pair * b.row;
    products->multiply(li_columns(a, p, li_min(a.columns, p + LI_KC)), b, &t);
    t.from = c.at;
    p += LI_KC;
  } while (p < a.columns);
}
/* C = alpha A B (+ C). `panels` is room for B's. */
LI_HOT void li_matmul(const li_kernels *kernels, float alpha, li_matrix a, li_matrix b, li_out c, float *panels) {
  const int64_t nr = kernels->nr;
  /* Copying pays if a panel is read more than twice. Otherwise B's whole panels are read in place. */
  const int64_t whole = b.column == 1 && a.rows <= 2 * kernels->mr ? b.columns / nr * nr : 0;
  const li_panels own = { b.at, whole, nr, b.row, NULL };
  if (whole) li_matmul_panels(kernels, alpha, a, own, c);
  if (whole == b.columns) return;
  c.at += whole;
  li_matmul_panels(kernels, alpha, a, li_words_of(kernels, li_columns(b, whole, b.columns), panels, NULL), c);
}
/* C = alpha A B (+ C). With `words` the operands are rounded. */
LI_HOT void li_matmul_words(const li_kernels *kernels, float alpha, li_matrix a, li_matrix b,
                            li_out c, float *panels, float *words) {
  if (words) li_matmul_panels(kernels, alpha, a, li_words_of(kernels, b, panels, words), c);
  else li_matmul(kernels, alpha, a, b, c, panels);
}

/* How a gemm is split among threads, and a thread's scratch. Each batch item has row_parts x column_parts parts. Each
   thread makes its own panels, so that threads never wait for each other. */
typedef struct li_gemm_plan {
  const li_kernels *kernels;
  const li_gemm *g;
  const li_products *products;
  char *scratch;
  int64_t row_parts, column_parts, columns; /* columns: of a block */
  int64_t a_size, b_size, sum_size; /* Floats */
  int64_t thread_bytes;             /* With several threads it includes a li_gemm_thread. */
} li_gemm_plan;
/* A thread's own memory. `held` is the block of B whose panels it has, since batch items often share B. */
typedef struct li_gemm_thread {
  float *a, *b, *sum;
  const float *held;
  int64_t held_n, held_k;
} li_gemm_thread;
/* Returns the place of (row, column) in A or B, where a word may hold two numbers. */
LI_HOT const float *li_place(const float *x, bool words, int64_t row, int64_t x_row, int64_t column, int64_t x_column) {
  const int64_t down = words && x_row == 1 ? row / 2 : row * x_row;
  const int64_t across = words && x_column == 1 ? column / 2 : column * x_column;
  return x + down + across;
}

/* Tells whether C is added after the activation. Partial sums then need their own place. */
LI_HOT bool li_gemm_late(const li_gemm *g) {
  return g->accumulate && (g->activation != LI_NO_ACTIVATION || g->pre);
}

LI_HOT li_gemm_plan li_gemm_plan_of(const li_kernels *kernels, const li_gemm *g, int64_t threads) {
  const li_products *products = li_products_of(kernels, LI_BF16(g));
  const int64_t batch = g->batch[0] * g->batch[1], block_k = li_min(g->k, LI_KC), mr = products->rows,
                nr = kernels->nr;
  const int64_t parts = threads == 1 || batch % threads == 0 || batch >= 4 * threads ? 1 : threads;
  const bool dense = g->a_column == 1 && g->a_row == g->k && g->k <= LI_KC;
  li_gemm_plan p;
  li_clear(&p, sizeof p);
  p.kernels = kernels;
  p.g = g;
  p.products = products;
  p.row_parts = p.column_parts = 1;
  if (parts > 1) {
    const int64_t tiles = li_max(li_divide_up(g->m, mr), 1), panels = li_max(li_divide_up(g->n, nr), 1);
    if (g->m < g->n) p.column_parts = li_min(parts, panels);
    p.row_parts = li_min(parts / p.column_parts, tiles);
    if (g->m >= g->n) p.column_parts = li_min(parts / p.row_parts, panels);
  }
  /* With few rows, panels are used at once and should stay in the cache. */
  p.columns = g->m <= 2 * mr ? 4 * nr : LI_NC / nr * nr;
  if (products->room && g->k <= LI_KC / 2) p.columns *= 2; /* Words are half as large. */
  p.columns = li_min(p.columns, li_divide_up(li_max(g->n, 1), nr) * nr);
  p.b_size = g->b_panels ? 0 : p.columns * li_divide_up(block_k, products->pair);
  if (LI_BF16(g)) p.a_size = li_words_size(kernels, g->a_row == 1 && g->a_column != 1);
  else if (mr > 1 && g->n > 2 * nr && g->m > 1 && !dense)
    p.a_size = mr * LI_KA * (g->a_row == 1 && g->a_column != 1 ? LI_TILES_ABREAST : 1);
  /* Use more parts than threads if that repeats no panels of B and no gathered rows of A. */
  if (parts > 1 && p.column_parts == 1 && (g->b_panels || (g->k <= LI_KC && g->n <= LI_NC)))
    p.row_parts = li_min(LI_GROUPS * p.row_parts, li_max(li_divide_up(g->m, mr), 1));
  else if (parts > 1 && p.row_parts == 1 && !p.a_size)
    p.column_parts = li_min(LI_GROUPS * p.column_parts, li_max(li_divide_up(g->n, nr), 1));
  if (((li_gemm_late(g) && !g->pre) || g->words_row) && g->k > LI_KC)
    p.sum_size = li_min(LI_SUM_ROWS, g->m) * p.columns;
  p.thread_bytes = li_floats(p.a_size) + li_floats(p.b_size) + li_floats(p.sum_size);
  if (threads > 1) p.thread_bytes += (int64_t)li_round(sizeof(li_gemm_thread));
  return p;
}

typedef struct li_gemm_work { const li_kernels *kernels; const li_gemm *g; float *panels; } li_gemm_work;

/* Panels for several products are stored one block of k after the other. */
LI_HOT int64_t li_panels_at(const li_kernels *kernels, const li_gemm *g, int64_t pair, int64_t column, int64_t p) {
  return li_panels_size(kernels, g->n, p / pair) + column * li_divide_up(li_min(g->k - p, LI_KC), pair);
}
LI_HOT void li_panels_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_gemm_work *w = (const li_gemm_work *)work;
  const li_gemm *g = w->g;
  const int64_t column = first * w->kernels->nr, n = li_min(g->n, last * w->kernels->nr) - column;
  const li_products *products = li_products_of(w->kernels, LI_BF16(g));
  (void)thread;
  for (int64_t p = 0; p < g->k; p += LI_KC) {
    const li_matrix b = {
      g->b + p * g->b_row + column * g->b_column, li_min(g->k - p, LI_KC), n, g->b_row, g->b_column
    };
    products->fill_panels(b, w->panels + li_panels_at(w->kernels, g, products->pair, column, p));
  }
}
LI_FN size_t li_panels_bytes(const li_kernels *kernels, const li_gemm *g) {
  if (!kernels->panels) return 0;
  if (LI_HAS_INT8 && g->b_int8) return li_int8_panels_bytes(kernels, g);
  const int64_t lines = li_divide_up(g->k, li_products_of(kernels, LI_BF16(g))->pair);
  return li_round(li_bytes(li_panels_size(kernels, g->n, lines)));
}
LI_HOT void li_run_make_panels(const li_kernels *kernels, const li_gemm *g, const li_parallel *parallel, void *panels) {
  li_gemm_work w = { kernels, g, (float *)panels };
  if (!kernels->panels) return;
  if (LI_HAS_INT8 && g->b_int8) li_int8_make_panels(kernels, g, parallel, panels);
  else li_each(parallel, li_divide_up(g->n, kernels->nr), li_panels_task, &w);
}

LI_HOT void li_gemm_target(const li_gemm *g, int64_t x, int64_t y, int64_t row, int64_t column, li_target *t) {
  const int64_t at = x * g->c_batch[0] + y * g->c_batch[1] + row * g->c_row + column;
  const int64_t word = row * g->words_row + column / 2;
  t->late = li_gemm_late(g);
  t->c = t->sum = g->c + at;
  t->pre = li_offset(g->pre, at);
  t->bias = li_from(g->bias, column);
  t->from = li_from(g->residual, at);
  if (g->accumulate && !t->late) t->from = t->c;
  t->c_row = t->sum_row = t->from_row = g->c_row;
  t->alpha = g->alpha;
  t->activation = g->activation;
  t->bf16 = g->bf16;
  t->a_words = g->a_words;
  t->words_row = g->words_row;
  t->sums_row = g->sums_row;
  t->words = li_offset(g->words, word);
  t->slope = li_from(g->slope, word);
  t->sums = li_offset(g->sums, row / 32 * g->sums_row + column);
}

/* Multiplies m rows by the block's n columns from `column` on, over all of k. */
LI_HOT void li_gemm_block(const li_gemm_plan *plan, li_gemm_thread *thread, int64_t m, int64_t n,
                          int64_t column, const float *a, const float *b, li_target *t) {
  const li_kernels *kernels = plan->kernels;
  const li_products *products = plan->products;
  const li_gemm *g = plan->g;
  int64_t p = 0;
  do {
    const int64_t k = li_min(g->k - p, LI_KC);
    const li_matrix x = { li_place(a, g->a_words, 0, g->a_row, p, g->a_column), m, k, g->a_row, g->a_column };
    const li_matrix y = { b + p * g->b_row, k, n, g->b_row, g->b_column };
    li_panels panels = { thread->b, n, kernels->nr * li_divide_up(k, products->pair), kernels->nr,
                         plan->a_size ? thread->a : NULL };
    if (g->b_panels) panels.at = g->b_panels + li_panels_at(kernels, g, products->pair, column, p);
    else if (g->b_words) products->word_panels(y, thread->b);
    else if (thread->held != y.at || thread->held_n != n || thread->held_k != k) products->fill_panels(y, thread->b);
    thread->held = y.at;
    thread->held_n = n;
    thread->held_k = k;
    t->finish = p + k >= g->k && (t->bias || t->pre || t->words || t->activation != LI_NO_ACTIVATION || t->late);
    products->multiply(x, panels, t);
    t->from = t->sum;
    t->from_row = t->sum_row;
    p += LI_KC;
  } while (p < g->k);
}

/* Multiplies rows [row, row_end) by columns [column, column_end) of batch item x, y. */
LI_HOT void li_gemm_part(const li_gemm_plan *plan, li_gemm_thread *thread, int64_t x, int64_t y, int64_t row,
                         int64_t row_end, int64_t column, int64_t column_end) {
  const li_gemm *g = plan->g;
  const int64_t step = plan->sum_size ? LI_SUM_ROWS : row_end - row;
  const float *a = g->a + x * g->a_batch[0] + y * g->a_batch[1], *b = g->b + x * g->b_batch[0] + y * g->b_batch[1];
  for (; row < row_end; row += step)
    for (int64_t j = column; j < column_end; j += plan->columns) {
      li_target t;
      li_gemm_target(g, x, y, row, j, &t);
      if (t.late && t.pre) t.sum = t.pre;
      if (plan->sum_size) {
        t.sum = thread->sum;
        t.sum_row = plan->columns;
      }
      li_gemm_block(plan, thread, li_min(row_end - row, step), li_min(column_end - j, plan->columns), j, li_place(a,
                    g->a_words, row, g->a_row, 0, 1), li_place(b, g->b_words, 0, 1, j, g->b_column), &t);
    }
}
LI_HOT void li_gemm_own(const li_gemm_plan *p, char *scratch, li_gemm_thread *own) {
  memset(own, 0, sizeof *own);
  own->a = li_take(&scratch, p->a_size);
  own->b = li_take(&scratch, p->b_size);
  own->sum = li_take(&scratch, p->sum_size);
}
LI_HOT li_gemm_thread *li_gemm_thread_at(const li_gemm_plan *p, int64_t thread) {
  return (li_gemm_thread *)(void *)(p->scratch + thread * p->thread_bytes);
}
LI_HOT void li_gemm_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_gemm_plan *p = (const li_gemm_plan *)work;
  const li_gemm *g = p->g;
  const int64_t parts = p->row_parts * p->column_parts, mr = p->products->rows, nr = p->kernels->nr;
  li_gemm_thread *own = li_gemm_thread_at(p, thread);
  for (int64_t u = first; u < last; u++) {
    const int64_t r = u % parts / p->column_parts, c = u % p->column_parts;
    li_gemm_part(p, own, u / parts / g->batch[1], u / parts % g->batch[1],
                 li_part_at(g->m, mr, r, p->row_parts), li_part_at(g->m, mr, r + 1, p->row_parts),
                 li_part_at(g->n, nr, c, p->column_parts), li_part_at(g->n, nr, c + 1, p->column_parts));
  }
}

/* Dot products need no panels and no partial sums: each thread has columns of its own. */
LI_HOT bool li_gemm_dots(const li_gemm *g) { return g->dots && g->a_column == 1 && g->b_row == 1; }
LI_HOT void li_dots_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_gemm_work *w = (const li_gemm_work *)work;
  const li_gemm *g = w->g;
  const int64_t column = first * w->kernels->nr, end = li_min(g->n, last * w->kernels->nr);
  (void)thread;
  for (int64_t x = 0; x < g->batch[0]; x++)
    for (int64_t y = 0; y < g->batch[1]; y++) {
      li_target t;
      li_gemm_target(g, x, y, 0, column, &t);
      t.finish = g->bias || g->pre || g->activation != LI_NO_ACTIVATION;
      const li_matrix a = { g->a + x * g->a_batch[0] + y * g->a_batch[1], g->m, g->k, g->a_row, 1 };
      const li_matrix b = {
        g->b + x * g->b_batch[0] + y * g->b_batch[1] + column * g->b_column, g->k, end - column, 1, g->b_column
      };
      w->kernels->dot_rows(a, b, &t);
    }
}
LI_HOT size_t li_gemm_scratch(const li_kernels *kernels, const li_gemm *g, int64_t threads) {
  const int64_t count = li_max(threads, 1);
  if (!kernels->panels) return 0;
  if (LI_HAS_INT8 && g->b_int8) return li_int8_start(kernels, g, count, NULL).bytes;
  if (li_gemm_dots(g)) return 0;
  li_gemm_plan p = li_gemm_plan_of(kernels, g, count);
  return (size_t)(p.thread_bytes * count);
}

LI_HOT void li_run_gemm(const li_kernels *kernels, const li_gemm *g, const li_parallel *parallel, void *scratch) {
  const int64_t threads = li_threads(parallel);
  if (!kernels->panels) {
    li_gemm_reference(g);
    return;
  }
  if (g->m <= 0 || g->n <= 0) return;
  if (LI_HAS_INT8 && g->b_int8) {
    li_int8_run(kernels, g, parallel, scratch);
    return;
  }
  if (li_gemm_dots(g)) {
    li_gemm_work dots = { kernels, g, NULL };
    li_each(parallel, li_divide_up(g->n, kernels->nr), li_dots_task, &dots);
    return;
  }
  li_gemm_plan p = li_gemm_plan_of(kernels, g, threads);
  p.scratch = scratch ? (char *)scratch : (char *)g->c; /* Without k none is needed, but null + 0 is undefined. */
  if (threads > 1) {
    for (int64_t t = 0; t < threads; t++)
      li_gemm_own(&p, (char *)(li_gemm_thread_at(&p, t)) + li_round(sizeof(li_gemm_thread)), li_gemm_thread_at(&p, t));
    li_each(parallel, g->batch[0] * g->batch[1] * p.row_parts * p.column_parts, li_gemm_task, &p);
    return;
  }
  li_gemm_thread own;
  li_gemm_own(&p, p.scratch, &own); /* A single part needs no division. */
  for (int64_t x = 0; x < g->batch[0]; x++)
    for (int64_t y = 0; y < g->batch[1]; y++) li_gemm_part(&p, &own, x, y, 0, g->m, 0, g->n);
}
#endif

/* ----------------
   >>elementwise: maps, sums, softmax, layer norm, cross-entropy, the short convolution, dropout, optimisers
   All arrays are dense and may have any size and alignment. Maps can run in place. Long sums add short float sums in
   double, in a fixed order. Column sums treat each column alone, so its bits do not depend on the other columns. The
   references stand first, then the loops in their order. A new kernel needs a row in LI_KERNELS, a loop, and a
   reference here or, for backward, in tests/kernels/backward_reference.h. Guarded by tests/kernels/elementwise.c.
   ---------------- */
#ifndef LI_PASS
/* ---- The reference ---- */
/* This makes li_activate_reference, li_add_reference, li_mul_reference, li_scale_reference and
   li_scale_add_reference. */
#define LI_MAP_REFERENCE(name, arguments, y, value) \
  LI_FN void li_##name##_reference arguments { \
    for (int64_t i = 0; i < n; i++) (y)[i] = (value); \
  }
LI_MAP_REFERENCE(activate, (int kind, int64_t n, const float *x, float *y), y, li_activation_scalar(kind, x[i]))
LI_MAP_REFERENCE(add, (int64_t n, const float *a, const float *b, float *y), y, a[i] + b[i])
LI_MAP_REFERENCE(mul, (int64_t n, const float *a, const float *b, float *y), y, a[i] * b[i])
LI_MAP_REFERENCE(scale, (int64_t n, float factor, const float *x, float *y), y, factor * x[i])
LI_MAP_REFERENCE(scale_add, (int64_t n, float factor, const float *x, float *y), y, y[i] + factor * x[i])
#undef LI_MAP_REFERENCE
LI_FN void li_elementwise_reference(const li_elements *e, float *y) {
  const float *const *x = e->x;
  for (int64_t i = 0; i < e->n; i++)
    y[i] = li_each_scalar(e->kind, x[0][i * e->step[0]], x[1][i * e->step[1]], x[2][i * e->step[2]]);
}

LI_FN double li_sum_reference(int64_t n, const float *x) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i];
  return sum;
}
LI_FN double li_sum_squares_reference(int64_t n, const float *x) { return li_inner(n, x, 1, x, 1); }
LI_FN float li_dot_reference(int64_t n, const float *a, const float *b) {
  return (float)li_inner(n, a, 1, b, 1);
}

/* x [rows, n] -> y [rows, n]: y = exp(x - max) / sum. A row of only -Inf gives 0. */
LI_FN void li_softmax_reference(int64_t rows, int64_t n, const float *x, float *y) {
  for (; rows > 0; rows--, x += n, y += n) {
    float max = -INFINITY;
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
      if (x[i] > max) max = x[i];
    if (max == -INFINITY) max = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)(y[i] = li_exp1_scalar(x[i] - max));
    if (sum == 0) sum = 1;
    for (int64_t i = 0; i < n; i++) y[i] = (float)((double)y[i] / sum);
  }
}

/* x [rows, n] -> y [rows, n]: y = (x - mean) rstd weight + bias, rstd = 1 / sqrt(variance + epsilon). With rms the mean
   and the bias are 0 [arXiv 1910.07467]. */
LI_FN void li_layer_norm_reference(const li_layer_norm *a) {
  if (a->n <= 0) return;
  for (int64_t row = 0; row < a->rows; row++) {
    const float *x = a->x + row * a->n;
    const double n = (double)a->n;
    double center = 0, variance = 0;
    if (a->rms) variance = li_sum_squares_reference(a->n, x) / n;
    else {
      center = li_sum_reference(a->n, x) / n;
      for (int64_t i = 0; i < a->n; i++) variance += ((double)x[i] - center) * ((double)x[i] - center) / n;
    }
    const double r = 1 / sqrt(variance + (double)a->epsilon);

    for (int64_t i = 0; i < a->n; i++) {
      double y = ((double)x[i] - center) * r;
      if (a->weight) y *= (double)a->weight[i];
      if (a->bias && !a->rms) y += (double)a->bias[i];
      a->y[row * a->n + i] = (float)y;
    }
    if (a->mean) a->mean[row] = (float)center;
    if (a->rstd) a->rstd[row] = (float)r;
  }
}
/* y_j += factor sum_i x_ij */
LI_FN void li_sum_rows_reference(li_matrix x, float factor, float *y) {
  for (int64_t j = 0; j < x.columns; j++) {
    double sum = 0;
    for (int64_t i = 0; i < x.rows; i++) sum += (double)x.at[i * x.row + j];
    y[j] += (float)((double)factor * sum);
  }
}

/* loss = -sum_j target_j log softmax(logits)_j, target = (1 - smoothing) onehot + smoothing / classes */
LI_FN void li_cross_entropy_reference(const li_cross_entropy *a) {
  const li_row_sums none = { 0, 0, -INFINITY, 0 };
  for (int64_t row = 0; row < a->rows; row++) {
    const float *x = a->logits + row * a->logits_row;
    const int64_t label = a->labels[row] - a->first;
    li_row_sums own, *s = &own;
    double log_sum = 0, target = 0;
    if (a->sums) s = a->sums + row;
    if (a->first == 0) *s = none;

    for (int64_t j = 0; j < a->columns; j++) {
      if (x[j] > s->shift) {
        s->exps *= (double)li_exp1_scalar(s->shift - x[j]);
        s->shift = x[j];
      }
      if (x[j] != -INFINITY) s->exps += (double)li_exp1_scalar(x[j] - s->shift);
      s->logits += (double)x[j];
    }
    if (label >= 0 && label < a->columns) s->label = x[label];
    if (a->first + a->columns < a->classes) continue;

    if (a->labels[row] >= 0 && s->exps != 0) log_sum = (double)s->shift + (double)li_log1_scalar((float)s->exps);
    if (a->smoothing < 1) target = (double)(1 - a->smoothing) * (double)s->label;
    if (a->smoothing > 0) target += (double)a->smoothing * s->logits / (double)a->classes;
    a->loss[row] = (float)(log_sum - target);
    if (a->labels[row] < 0) a->loss[row] = 0;
    if (a->lse) a->lse[row] = (float)log_sum;
  }
}

/* Rows before the first are history's, or 0. */
LI_FN void li_short_convolution_reference(const li_convolution *a) {
  for (int64_t t = 0; t < a->rows; t++)
    for (int64_t c = 0; c < a->n; c++) {
      float sum = 0;
      if (a->bias) sum = a->bias[c];
      for (int64_t i = 0; i < a->width; i++) {
        const int64_t row = t - a->width + 1 + i;
        float x = 0;
        if (row >= 0) x = a->x[row * a->n + c];
        else if (a->history) x = a->history[(row + a->width - 1) * a->n + c];
        sum += a->weight[c * a->width + i] * x;
      }
      a->y[t * a->n + c] = sum;
    }
}

LI_FN float li_dropout_at(const li_dropout *d, int64_t element) {
  uint32_t word[4];
  if (d->threshold == 0) return 1.0f;
  const uint64_t place = d->first + (uint64_t)element;
  uint32_t counter[4] = { (uint32_t)(place / 8), (uint32_t)(place / 8 >> 32), d->op, d->step };
  li_philox(counter, d->seed, word);
  if ((word[place % 8 / 2] >> (place % 2 * 16) & 0xFFFFu) < d->threshold) return 0.0f;
  return d->keep;
}
LI_FN void li_dropout_reference(const li_dropout *d, int64_t first, int64_t n, const float *x, float *y,
                                bool accumulate) {
  for (int64_t i = 0; i < n; i++) {
    const float mask = li_dropout_at(d, first + i);
    float kept = 0; /* A dropped NaN too */
    if (mask > 0) kept = x[i] * mask;
    if (accumulate) kept += y[i];
    y[i] = kept;
  }
}

LI_FN void li_sgd_reference(const li_update *u) {
  for (int64_t i = 0; i < u->count; i++) {
    float g = u->grad[i] * u->factor + u->decay * u->value[i];
    if (u->momentum != 0) {
      const float m = u->moment[0][i] = u->momentum * u->moment[0][i] + g;
      if (u->nesterov) g += u->momentum * m;
      else g = m;
    }
    u->value[i] -= u->lr * g;
    u->grad[i] = 0;
  }
}

/* m = beta1 m + (1 - beta1) g, s = beta2 s + (1 - beta2) g^2, value -= lr mhat / (sqrt(shat) + epsilon) + lr decay
   value */
LI_FN void li_adam_reference(const li_update *u) {
  float coupled = 0, decay = u->lr * u->decay;
  const float step = (float)((double)u->lr / (double)u->correction1);
  const float root = (float)(1 / sqrt((double)u->correction2));
  if (u->coupled) {
    coupled = u->decay;
    decay = 0;
  }
  for (int64_t i = 0; i < u->count; i++) {
    const float v = u->value[i], g = u->grad[i] * u->factor + coupled * v;
    const float m = u->moment[0][i] = u->beta1 * u->moment[0][i] + (1 - u->beta1) * g;
    const float s = u->moment[1][i] = u->beta2 * u->moment[1][i] + (1 - u->beta2) * (g * g);
    u->value[i] = v - decay * v - step * m / ((float)sqrt((double)s) * root + u->epsilon);
    u->grad[i] = 0;
  }
}
#endif

#ifdef LI_PASS_LOOPS
#define LI_GET(p) LI_K(get)((p) + i, n - i)
#define LI_PUT(p, v) LI_K(put)((p) + i, v, n - i)
#define LI_BEFORE(add, p) ((add) ? LI_K(get)((p) + i, n - i) : vf_set(0))

/* ---- Maps: LI_SHORT_MAP has a separate loop for whole vectors, whose time depends less on its alignment ---- */
/* This makes LI_K of activate and activate_grad, then of add, mul, scale and scale_add. */
#define LI_MAP(name, arguments, y, value) \
  LI_FN void LI_K(name) arguments { \
    for (int64_t i = 0; i < n; i += VF) LI_K(put)(y + i, value, n - i); \
  }
#define LI_SHORT_MAP(name, arguments, y, value) \
  LI_FN void LI_K(name) arguments { \
    int64_t i = 0; \
    for (; n - i >= VF; i += VF) LI_K(put)(y + i, value, n - i); \
    if (i < n) LI_K(put)(y + i, value, n - i); \
  }
LI_MAP(activate, (int kind, int64_t n, const float *x, float *y), y, LI_K(map1)(kind, LI_GET(x)))
LI_MAP(activate_grad, (int kind, int64_t n, const float *x, const float *dy, bool add, float *dx), dx,
       vf_fma(LI_GET(dy), LI_K(map1_slope)(kind, LI_GET(x)), LI_BEFORE(add, dx)))
LI_SHORT_MAP(add, (int64_t n, const float *a, const float *b, float *y), y, vf_add(LI_GET(a), LI_GET(b)))
LI_SHORT_MAP(mul, (int64_t n, const float *a, const float *b, float *y), y, vf_mul(LI_GET(a), LI_GET(b)))
LI_SHORT_MAP(scale, (int64_t n, float factor, const float *x, float *y), y, vf_mul(vf_set(factor), LI_GET(x)))
LI_SHORT_MAP(scale_add, (int64_t n, float factor, const float *x, float *y), y,
       vf_fma(vf_set(factor), LI_GET(x), LI_GET(y)))
#undef LI_MAP

/* ---- LUNA_ELEMENTWISE: an input with step 0 is a single number ---- */
#define LI_INPUT(k) step[k] ? LI_K(get)(x[k] + i, n - i) : vf_set(*x[k])
LI_FN void LI_K(elementwise)(const li_elements *e, float *y) {
  const float *const *x = e->x;
  const int64_t *step = e->step, n = e->n;
  const int kind = e->kind;
  for (int64_t i = 0; i < n; i += VF) {
    const vf a = LI_INPUT(0), b = LI_INPUT(1), c = LI_INPUT(2);
    LI_PUT(y, LI_K(elementwise1)(kind, a, b, c));
  }
}
LI_FN void LI_K(elementwise_slope)(const li_elements *e, int input, const float *dy, float *y, bool add) {
  const float *const *x = e->x;
  const int64_t *step = e->step, n = e->n;
  const int kind = e->kind;
  for (int64_t i = 0; i < n; i += VF) {
    const vf a = LI_INPUT(0), b = LI_INPUT(1), c = LI_INPUT(2);
    const vf v = LI_K(elementwise1_slope)(kind, input, a, b, c, LI_GET(dy));
    LI_PUT(y, add ? vf_add(LI_GET(y), v) : v);
  }
}

/* ---- Sums along a row ---- */
#define LI_SUM 0 /* a */
#define LI_PRODUCT 1 /* a b */
#define LI_EXP 2 /* exp(a - shift) */
#define LI_MOMENTS 3 /* d and d^2, d = a - shift */
#define LI_NORM 4 /* g and g (a - shift) factor, with g = b c, or b if c is null */

/* Adds the terms of the vector at i, of which `left` floats exist, to p and q. */
LI_INLINE void LI_K(term)(int kind, int64_t i, int64_t left, const float *a, const float *b, const float *c,
                          vf shift, vf factor, vf *p, vf *q) {
  if (kind == LI_SUM) *p = vf_add(*p, LI_K(get)(a + i, left));
  if (kind == LI_PRODUCT) *p = vf_fma(LI_K(get)(a + i, left), LI_K(get)(b + i, left), *p);
  if (kind == LI_EXP)
    *p = vf_add(*p, vf_exp(vf_sub(LI_K(get_filled)(a + i, left, vf_set(-INFINITY)), shift)));
  if (kind == LI_MOMENTS) {
    const vf d = vf_sub(LI_K(get_filled)(a + i, left, shift), shift);
    *p = vf_add(*p, d);
    *q = vf_fma(d, d, *q);
  }
  if (kind == LI_NORM) {
    vf g = LI_K(get)(b + i, left);
    if (c) g = vf_mul(g, LI_K(get)(c + i, left));
    *p = vf_add(*p, g);
    *q = vf_fma(g, vf_mul(vf_sub(LI_K(get)(a + i, left), shift), factor), *q);
  }
}

/* Returns the first sum; *second gets the second sum of a kind that has two. Each of four chains sums sixteen float
   terms at a time; the results are added in double. */
LI_INLINE double LI_K(reduce)(int kind, int64_t n, const float *a, const float *b, const float *c, float shift,
                              float factor, double *second) {
  const vf s = vf_set(shift), f = vf_set(factor);
  double sum = 0, other = 0;
  int64_t i = 0;
  while (i < n) {
    const int64_t end = li_min(n, i + 64 * VF);
    vf p0 = vf_zero(), p1 = p0, p2 = p0, p3 = p0, q0 = p0, q1 = p0, q2 = p0, q3 = p0;
    for (; i + 4 * VF <= end; i += 4 * VF) {
      LI_K(term)(kind, i, VF, a, b, c, s, f, &p0, &q0);
      LI_K(term)(kind, i + VF, VF, a, b, c, s, f, &p1, &q1);
      LI_K(term)(kind, i + 2 * VF, VF, a, b, c, s, f, &p2, &q2);
      LI_K(term)(kind, i + 3 * VF, VF, a, b, c, s, f, &p3, &q3);
    }
    for (; i < end; i += VF) LI_K(term)(kind, i, end - i, a, b, c, s, f, &p0, &q0);
    sum += (double)vf_sum(vf_add(vf_add(p0, p1), vf_add(p2, p3)));
    if (second) other += (double)vf_sum(vf_add(vf_add(q0, q1), vf_add(q2, q3)));
  }
  if (second) *second = other;
  return sum;
}

LI_FN double LI_K(sum)(int64_t n, const float *x) {
  return LI_K(reduce)(LI_SUM, n, x, NULL, NULL, 0, 0, NULL);
}
LI_FN double LI_K(products)(int64_t n, const float *a, const float *b) {
  return LI_K(reduce)(LI_PRODUCT, n, a, b, NULL, 0, 0, NULL);
}
LI_FN double LI_K(sum_squares)(int64_t n, const float *x) {
  const double sum = LI_K(products)(n, x, x);
  if (sum < (double)INFINITY) return sum;
  return li_sum_squares_reference(n, x); /* The squares exceeded float's range. */
}
LI_FN float LI_K(dot)(int64_t n, const float *a, const float *b) { return (float)LI_K(products)(n, a, b); }

/* ---- Softmax ---- */

/* Returns what to subtract before exp: the maximum of x and `largest`, or 0 if that is -Inf. A NaN may be missed here,
   since it makes the sum of exp NaN anyway. */
LI_INLINE float LI_K(softmax_shift)(int64_t n, const float *x, float largest) {
  vf max = vf_set(largest);
  for (int64_t i = 0; i < n; i += VF) max = vf_max(max, LI_K(get_filled)(x + i, n - i, max));
  largest = vf_hmax(max);
  if (largest > -INFINITY) return largest;
  return 0;
}

LI_FN void LI_K(softmax)(int64_t rows, int64_t n, const float *x, float *y) {
  for (int64_t row = 0; row < rows; row++, x += n, y += n) {
    const vf shift = vf_set(LI_K(softmax_shift)(n, x, -INFINITY));
    for (int64_t i = 0; i < n; i += VF) LI_PUT(y, vf_exp(vf_sub(LI_GET(x), shift)));
    const double sum = LI_K(sum)(n, y);
    LI_K(scale)(n, (float)(sum > 0 ? 1 / sum : sum), y, y); /* An empty row gives 0; NaN propagates. */
  }
}

LI_FN void LI_K(softmax_backward)(int64_t rows, int64_t n, const float *y, const float *dy, float *dx) {
  for (int64_t row = 0; row < rows; row++, y += n, dy += n, dx += n) {
    const vf mean = vf_set(LI_K(dot)(n, y, dy));
    for (int64_t i = 0; i < n; i += VF) LI_PUT(dx, vf_fma(LI_GET(y), vf_sub(LI_GET(dy), mean), LI_GET(dx)));
  }
}

/* ---- Layer norm ---- */
LI_FN void LI_K(layer_norm)(const li_layer_norm *a) {
  const float *x = a->x, *bias = a->bias, *const weight = a->weight;
  const int64_t n = a->n;
  const bool rms = a->rms;
  float *y = a->y;
  if (n <= 0) return;
  if (rms) bias = NULL;
  for (int64_t row = 0; row < a->rows; row++, x += n, y += n) {
    float center = 0;
    double squares, off = 0;
    if (rms) squares = LI_K(products)(n, x, x);
    else { /* The second pass also computes the mean's rounding error. */
      center = (float)(LI_K(sum)(n, x) / (double)n);
      off = LI_K(reduce)(LI_MOMENTS, n, x, NULL, NULL, center, 0, &squares) / (double)n;
    }
    double variance = squares / (double)n - off * off;
    if (variance < 0) variance = 0;
    const float r = (float)(1 / sqrt(variance + (double)a->epsilon));
    const vf vcenter = vf_set(center), voff = vf_set((float)off), vr = vf_set(r);
    for (int64_t i = 0; i < n; i += VF) {
      vf v = vf_mul(vf_sub(vf_sub(LI_GET(x), vcenter), voff), vr);
      if (weight) v = vf_mul(v, LI_GET(weight));
      if (bias) v = vf_add(v, LI_GET(bias));
      LI_PUT(y, v);
    }
    if (LI_TRAINS && a->mean) a->mean[row] = (float)((double)center + off);
    if (LI_TRAINS && a->rstd) a->rstd[row] = r;
  }
}

/* dx = rstd (g - mean(g) - xhat mean(g xhat)) (+ dx), g = dy weight, xhat = (x - mean) rstd. With rms, mean(g) is 0. */
LI_FN void LI_K(layer_norm_backward)(const li_layer_norm *a) {
  const float *x = a->x, *dy = a->dy, *const weight = a->weight;
  const int64_t n = a->n;
  const bool add = a->add;
  float *dx = a->dx;
  if (n <= 0) return;
  for (int64_t row = 0; row < a->rows; row++, x += n, dy += n, dx += n) {
    const float mean = a->mean[row], rstd = a->rstd[row];
    double moment, sum = LI_K(reduce)(LI_NORM, n, x, dy, weight, mean, rstd, &moment);
    const vf center = vf_set(mean), r = vf_set(rstd);
    if (a->rms) sum = 0;
    const vf mean_g = vf_set((float)(sum / (double)n)), mean_moment = vf_set((float)(moment / (double)n));
    for (int64_t i = 0; i < n; i += VF) {
      const vf xhat = vf_mul(vf_sub(LI_GET(x), center), r);
      vf g = LI_GET(dy);
      if (weight) g = vf_mul(g, LI_GET(weight));
      LI_PUT(dx, vf_fma(r, vf_fnma(xhat, mean_moment, vf_sub(g, mean_g)), LI_BEFORE(add, dx)));
    }
  }
}

/* ---- Sums along columns, over rows in order ---- */
#define LI_SUM_COLUMNS (4 * VF) /* Columns held in registers */
#define LI_COLUMN(i) \
  if (vectors > i) \
    sum##i = b ? vf_fma(LI_K(get)(at + i * VF, left - i * VF), \
                        vf_mul(vf_sub(LI_K(get)(b + i * VF, left - i * VF), center), scale), sum##i) \
                              : vf_add(sum##i, LI_K(get)(at + i * VF, left - i * VF));
/* Computes float sums of at most LI_FLOAT_ROWS rows, which LI_K(column_sums) adds up. */
LI_INLINE void LI_K(column_part)(int vectors, li_matrix a, const float *b, const li_layer_norm *norm, int64_t row,
                                 float *part) {
  vf sum0 = vf_zero(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  const float *at = a.at;
  const int64_t left = a.columns;
  for (int64_t r = 0; r < a.rows; r++, at += a.row) {
    vf center = vf_zero(), scale = vf_set(1);
    if (norm) {
      center = vf_set(norm->mean[row + r]);
      scale = vf_set(norm->rstd[row + r]);
    }
    LI_COLUMN(0) LI_COLUMN(1) LI_COLUMN(2) LI_COLUMN(3)
    if (b) b += a.row;
  }
  vf_store(part, sum0);
  vf_store(part + VF, sum1);
  vf_store(part + 2 * VF, sum2);
  vf_store(part + 3 * VF, sum3);
}

/* y[j y_column] += factor * sum over rows of a (b - mean) rstd. mean and rstd come from `norm`, or are 0 and 1. Without
   b the sum is that of a. b has a's strides. */
LI_FN void LI_K(column_sums)(li_matrix a, const float *b, const li_layer_norm *norm, float factor,
                             float *y, int64_t y_column) {
  float part[LI_SUM_COLUMNS];
  double total[LI_SUM_COLUMNS];
  int64_t n;
  for (int64_t first = 0; first < a.columns; first += n) {
    n = a.columns - first >= LI_SUM_COLUMNS ? LI_SUM_COLUMNS : li_min(a.columns - first, VF);
    li_clear(total, (size_t)n * sizeof *total);
    for (int64_t r = 0; r < a.rows; r += LI_FLOAT_ROWS) {
      const int64_t count = li_min(a.rows - r, LI_FLOAT_ROWS), at = r * a.row + first;
      const li_matrix rows = li_strided(a.at + at, count, n, a.row);
      /* Constants give each case its own loop. */
      if (n < LI_SUM_COLUMNS) LI_K(column_part)(1, rows, b ? b + at : NULL, norm, r, part);
      else if (b) LI_K(column_part)(4, rows, b + at, norm, r, part);
      else LI_K(column_part)(4, rows, NULL, NULL, 0, part);
      for (int64_t i = 0; i < n; i++) total[i] += (double)part[i];
    }
    for (int64_t i = 0; i < n; i++) y[(first + i) * y_column] += (float)((double)factor * total[i]);
  }
}

LI_FN void LI_K(layer_norm_weights)(const li_layer_norm *a, int64_t first, int64_t last) {
  const li_matrix dy = li_columns(li_dense(a->dy, a->rows, a->n), first, last);
  if (a->dweight) LI_K(column_sums)(dy, a->x + first, a, 1, a->dweight + first, 1);
  if (a->dbias) LI_K(column_sums)(dy, NULL, NULL, 1, a->dbias + first, 1);
}

LI_FN void LI_K(sum_rows)(li_matrix x, float factor, float *y) {
  LI_K(column_sums)(x, NULL, NULL, factor, y, 1);
}

/* ---- Cross-entropy: logits [rows, n], labels [rows] -> loss [rows] ---- */
/* Writes a row's loss after its last part. A label of -Inf costs Inf, even if a sum is 0. */
LI_FN void LI_K(cross_entropy_finish)(const li_cross_entropy *a, int64_t row, const li_row_sums *s) {
  double log_sum = s->exps;
  if (s->exps > 0) log_sum = (double)vf_first(vf_log(vf_set((float)s->exps)));
  double result = log_sum + ((double)s->shift - (double)s->label);
  if (a->smoothing > 0) result += (double)a->smoothing * ((double)s->label - s->logits / (double)a->classes);
  if (s->label == -INFINITY) result = log_sum + (double)INFINITY;
  if (a->lse) a->lse[row] = s->exps == 0 ? 0 : (float)((double)s->shift + log_sum);
  a->loss[row] = (float)result;
}

LI_FN void LI_K(cross_entropy)(const li_cross_entropy *a) {
  const li_row_sums none = { 0, 0, -INFINITY, 0 };
  for (int64_t row = 0; row < a->rows; row++) {
    const float *logits = a->logits + row * a->logits_row;
    const int64_t label = a->labels[row] - a->first;
    li_row_sums s = none;
    if (a->first > 0) s = a->sums[row];
    if (a->labels[row] < 0) {
      a->loss[row] = 0;
      if (a->lse) a->lse[row] = 0;
      continue;
    }
    const float shift = LI_K(softmax_shift)(a->columns, logits, s.shift);
    if (s.exps != 0 && shift > s.shift) s.exps *= (double)LI_K(exp1)(s.shift - shift);
    s.exps += LI_K(reduce)(LI_EXP, a->columns, logits, NULL, NULL, shift, 0, NULL);
    if (shift != 0 || s.exps != 0) s.shift = shift; /* A part of only -Inf does not count. */
    if (a->smoothing > 0) s.logits += LI_K(sum)(a->columns, logits);
    if (label >= 0 && label < a->columns) s.label = logits[label];
    if (a->first + a->columns == a->classes) LI_K(cross_entropy_finish)(a, row, &s);
    else a->sums[row] = s;
  }
}

/* grad (+)= factor (softmax - target), with the reference's target. */
LI_FN void LI_K(cross_entropy_backward)(const li_cross_entropy *a) {
  const vf f = vf_set(a->factor), base = vf_set(a->smoothing / (float)a->classes);
  const int64_t n = a->columns;
  if (n <= 0) return;
  for (int64_t row = 0; row < a->rows; row++) {
    const float *logits = a->logits + row * a->logits_row, *next = logits;
    if (row + 1 < a->rows) next += a->logits_row;
    float *grad = a->grad + row * a->grad_row;
    const int64_t label = a->labels[row] - a->first;
    const vf total = vf_set(a->lse[row]);
    if (a->labels[row] < 0) {
      if (!a->add) memset(grad, 0, li_bytes(n));
      continue;
    }
    for (int64_t i = 0; i < n; i += VF) {
      LI_PREFETCH(next + i);
      LI_PUT(grad, vf_fma(f, vf_sub(vf_exp(vf_sub(LI_GET(logits), total)), base), LI_BEFORE(a->add, grad)));
    }
    if (label >= 0 && label < n) grad[label] -= a->factor * (1 - a->smoothing);
  }
}

/* ---- Short convolution: x [rows, n] -> y [rows, n] ---- */
#define LI_TAPS 8 /* The stack holds this many taps and channels, transposed. */
#define LI_TAP_COLUMNS 64

/* y_t = bias + sum_i weight_i x_(t - width + 1 + i), or backward y_t += sum_i weight_i x_(t + width - 1 - i). Missing
   rows have no term, which sets a lower bound on i in both directions. */
LI_FN void LI_K(convolve)(bool backward, const li_convolution *a) {
  const int64_t rows = a->rows, channels = a->n, width = a->width;
  const float *const x = a->x, *const history = a->history, *const weight = a->weight, *const bias = a->bias;
  float *const y = a->y;
  float taps[LI_TAPS * LI_TAP_COLUMNS];
  const float *from[LI_TAPS];
  int64_t i;
  for (int64_t first = 0; first < channels; first += LI_TAP_COLUMNS) {
    const int64_t n = li_min(channels - first, LI_TAP_COLUMNS);
    for (int64_t base = 0; base < width; base += LI_TAPS) {
      const int64_t count = li_min(width - base, LI_TAPS);
      for (int64_t k = 0; k < count; k++)
        for (i = 0; i < n; i++) taps[k * LI_TAP_COLUMNS + i] = weight[(first + i) * width + base + k];
      for (int64_t t = 0; t < rows; t++) {
        int64_t low = width - 1 - t;
        if (backward) low = t + width - rows;
        else if (history) low = 0;
        low = li_max(0, low - base);
        float *y_at = y + t * channels + first;
        for (int64_t k = low; k < count; k++) {
          const int64_t away = width - 1 - base - k, row = backward ? t + away : t - away;
          from[k] = (row < 0 ? history + (row + width - 1) * channels : x + row * channels) + first;
        }
        for (i = 0; n - i >= 4 * VF; i += 4 * VF) {
          const float *start = bias ? bias + first + i : NULL;
          if (backward || base > 0) start = y_at + i;
          vf sum0 = vf_zero(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
          if (start) {
            sum0 = vf_load(start);
            sum1 = vf_load(start + VF);
            sum2 = vf_load(start + 2 * VF);
            sum3 = vf_load(start + 3 * VF);
          }
          for (int64_t k = low; k < count; k++) {
            const float *tap = taps + k * LI_TAP_COLUMNS + i, *x_at = from[k] + i;
            sum0 = vf_fma(vf_load(tap), vf_load(x_at), sum0);
            sum1 = vf_fma(vf_load(tap + VF), vf_load(x_at + VF), sum1);
            sum2 = vf_fma(vf_load(tap + 2 * VF), vf_load(x_at + 2 * VF), sum2);
            sum3 = vf_fma(vf_load(tap + 3 * VF), vf_load(x_at + 3 * VF), sum3);
          }
          vf_store(y_at + i, sum0);
          vf_store(y_at + i + VF, sum1);
          vf_store(y_at + i + 2 * VF, sum2);
          vf_store(y_at + i + 3 * VF, sum3);
        }
        for (; i < n; i += VF) {
          vf sum = vf_zero();
          if (backward || base > 0) sum = LI_GET(y_at);
          else if (bias) sum = LI_GET(bias + first);
          for (int64_t k = low; k < count; k++)
            sum = vf_fma(LI_GET(taps + k * LI_TAP_COLUMNS), LI_GET(from[k]), sum);
          LI_PUT(y_at, sum);
        }
      }
    }
  }
}

LI_FN void LI_K(short_convolution)(const li_convolution *a) { LI_K(convolve)(false, a); }
LI_FN void LI_K(short_convolution_backward)(const li_convolution *a) {
  li_convolution back = *a;
  back.x = a->dy;
  back.y = a->dx;
  back.history = back.bias = NULL;
  LI_K(convolve)(true, &back);
}
LI_FN void LI_K(short_convolution_weights)(const li_convolution *a, int64_t first, int64_t last) {
  const li_matrix dy = li_columns(li_dense(a->dy, a->rows, a->n), first, last);
  if (a->dweight) {
    for (int64_t i = 0; i < a->width; i++) {
      const int64_t skip = li_min(a->rows, a->width - 1 - i); /* The first rows do not use this weight. */
      const li_matrix rest = li_strided(dy.at + skip * dy.row, a->rows - skip, dy.columns, dy.row);
      LI_K(column_sums)(rest, a->x + first, NULL, 1, a->dweight + first * a->width + i, a->width);
    }
  }
  if (a->dbias) LI_K(column_sums)(dy, NULL, NULL, 1, a->dbias + first, 1);
}

/* ---- Dropout: x [n] -> y [n] ---- */

#ifdef LI_MM
/* x86 multiplies the lower halves of 64-bit lanes, so Philox's words are kept there. VU_ORDER is the counter of each
   lane, so that the results of even lanes, then of odd ones, are in order. */
#undef VU_ORDER
#undef vu_set
#if LI_IS(sse2)
#define VU_ORDER {0, 1}
#define vu_set _mm_set1_epi64x
#elif LI_IS(avx2)
#define VU_ORDER {0, 2, 1, 3}
#define vu_set _mm256_set1_epi64x
#else
#define VU_ORDER {0, 4, 1, 5, 2, 6, 3, 7}
#define vu_set _mm512_set1_epi64
#endif
#define VU (VF / 2)
#define vu_add(a, b) LI_MZ(0xFF, add_epi64, a, b)
#define vu_xor LI_SI(xor)
#define vu_mul(a, b) LI_MZ(0xFF, mul_epu32, a, b)
#define vu_high(a) LI_MZ(0xFF, srli_epi64, a, 32)
/* Puts words a and b side by side. */
LI_INLINE vi LI_K(join)(vi a, vi b) {
  const vi low = vu_high(LI_MZ(0xFF, slli_epi64, a, 32));
  return vu_xor(low, LI_MZ(0xFF, slli_epi64, b, 32));
}

LI_FN void LI_K(dropout_words)(const li_dropout *d, uint64_t at, uint16_t *half) {
  static const uint64_t order[VU] = VU_ORDER;
  for (int i = 0; i < 8; i += VU) {
    vi c0 = vu_add(vu_set((int64_t)at + i), LI_SI(loadu)((const vi *)(const void *)order)), c1 = vu_high(c0);
    vi c2 = vu_set(d->op), c3 = vu_set(d->step), k0 = vu_set((int64_t)d->seed), k1 = vu_set((int64_t)(d->seed >> 32));
    for (int round = 0; round < 10; round++) {
      const vi p = vu_mul(c0, vu_set(0xD2511F53u)), r = vu_mul(c2, vu_set(0xCD9E8D57u));
      c0 = vu_xor(vu_xor(vu_high(r), c1), k0);
      c1 = r;
      c2 = vu_xor(vu_xor(vu_high(p), c3), k1);
      c3 = p;
      k0 = vu_add(k0, vu_set(0x9E3779B9u));
      k1 = vu_add(k1, vu_set(0xBB67AE85u));
    }
    c0 = LI_K(join)(c0, c1);
    c2 = LI_K(join)(c2, c3);
    LI_SI(storeu)((vi *)(void *)(half + 8 * i), LI_MZ(0xFF, unpacklo_epi64, c0, c2));
    LI_SI(storeu)((vi *)(void *)(half + 8 * i + 4 * VU), LI_MZ(0xFF, unpackhi_epi64, c0, c2));
  }
}
#else
LI_FN void LI_K(dropout_words)(const li_dropout *d, uint64_t at, uint16_t *half) {
  for (uint64_t end = at + 8; at != end; at++, half += 8) {
    const uint32_t counter[4] = { (uint32_t)at, (uint32_t)(at >> 32), d->op, d->step };
    uint32_t word[4];
    li_philox(counter, d->seed, word);
    for (int i = 0; i < 8; i++) half[i] = (uint16_t)(word[i / 2] >> i % 2 * 16);
  }
}
#endif

/* Sets mask[i] to `keep` or 0 for element first + i. */
LI_FN void LI_K(dropout_mask)(const li_dropout *d, int64_t first, int64_t n, float *mask) {
  float block[64];
  uint16_t half[64];
  const int32_t threshold = (int32_t)d->threshold;
  const float keep = d->keep;
  while (n > 0) {
    const uint64_t at = d->first + (uint64_t)first;
    const int64_t skip = (int64_t)(at % 8);
    const int64_t count = li_min(n, 64 - skip);
    float *to = block;
    if (count == 64) to = mask;
    LI_K(dropout_words)(d, at / 8, half);
    for (int i = 0; i < 64; i++) to[i] = half[i] < threshold ? 0 : keep;
    if (count < 64) memcpy(mask, block + skip, li_bytes(count));
    first += count;
    mask += count;
    n -= count;
  }
}

LI_FN void LI_K(dropout)(const li_dropout *dropout, int64_t first, int64_t n, const float *x, float *y,
                         bool accumulate) {
  float mask[512];
  for (int64_t at = 0; at < n; at += 512) {
    const int64_t count = li_min(n - at, 512);
    LI_K(dropout_mask)(dropout, first + at, count, mask);
    for (int64_t i = 0; i < count; i += VF) {
      const vf m = LI_K(get)(mask + i, count - i), v = vf_mul(LI_K(get)(x + at + i, count - i), m);
      const vf kept = vf_select(vf_gt(m, vf_zero()), v, vf_zero()); /* A dropped NaN is 0. */
      LI_K(put)(y + at + i, accumulate ? vf_add(LI_K(get)(y + at + i, count - i), kept) : kept, count - i);
    }
  }
}

/* ---- Optimisers: value, grad and moments [count]; they also zero the gradient ---- */
LI_FN void LI_K(sgd)(const li_update *update) {
  const int64_t n = update->count;
  const vf lr = vf_set(update->lr), decay = vf_set(update->decay), momentum = vf_set(update->momentum),
      factor = vf_set(update->factor);
  const bool moving = update->momentum != 0, nesterov = update->nesterov;
  float *value = update->value, *grad = update->grad, *first = update->moment[0];
  for (int64_t i = 0; i < n; i += VF) {
    const vf v = LI_GET(value);
    vf g = vf_fma(LI_GET(grad), factor, vf_mul(decay, v));
    if (moving) {
      const vf m = vf_fma(momentum, LI_GET(first), g);
      LI_PUT(first, m);
      if (nesterov) g = vf_fma(momentum, m, g);
      else g = m;
    }
    LI_PUT(value, vf_fnma(lr, g, v));
    LI_PUT(grad, vf_zero());
  }
}

/* `step` and `root` include the bias correction of m and s. */
LI_FN void LI_K(adam)(const li_update *update) {
  const int64_t n = update->count;
  const vf beta1 = vf_set(update->beta1), rest1 = vf_set(1 - update->beta1);
  const vf beta2 = vf_set(update->beta2), rest2 = vf_set(1 - update->beta2);
  vf coupled = vf_zero(), decay = vf_set(update->lr * update->decay);
  const vf factor = vf_set(update->factor), epsilon = vf_set(update->epsilon);
  const vf step = vf_set((float)((double)update->lr / (double)update->correction1));
  const vf root = vf_set((float)(1 / sqrt((double)update->correction2)));
  float *value = update->value, *grad = update->grad, *first = update->moment[0], *second = update->moment[1];
  if (update->coupled) {
    coupled = vf_set(update->decay);
    decay = vf_zero();
  }
  for (int64_t i = 0; i < n; i += VF) {
    const vf v = LI_GET(value), g = vf_fma(LI_GET(grad), factor, vf_mul(coupled, v));
    const vf m = vf_fma(beta1, LI_GET(first), vf_mul(rest1, g));
    const vf s = vf_fma(beta2, LI_GET(second), vf_mul(rest2, vf_mul(g, g)));
    const vf move = vf_div(vf_mul(step, m), vf_fma(vf_sqrt(s), root, epsilon));
    LI_PUT(first, m);
    LI_PUT(second, s);
    LI_PUT(value, vf_sub(vf_fnma(decay, v, v), move));
    LI_PUT(grad, vf_zero());
  }
}
#endif

/* ----------------
   >>attention: out = softmax(scale Q K^T) V for every head (eq. 1), forward and backward
   Work goes by tiles of 64 queries (32 in a narrow window) and blocks of 512 keys; a thread holds one tile of scores
   at a time. Each block gives a partial result (maximum, sum, values); the tile's thread merges these in block order.
   Backward recomputes P from each row's log-sum-exp. li_attention has the arguments, li_head a head's place in them,
   li_tile a tile. The band and the reference stand first, then the loops over a tile, the plan and its scratch, and
   the two passes. To change what happens to scores, edit tile_softmax and its derivative, tile_slopes. Guarded by
   tests/kernels/attention.c.
   ---------------- */
#ifndef LI_PASS
LI_INLINE int64_t li_real_slots(const int32_t *lengths, int64_t b, int64_t slots) {
  if (lengths) return li_max(0, li_min(lengths[b], slots));
  return slots;
}

/* The real sizes of a head of a batch row, and its offsets into each tensor, into log_sum_exp and sums (row), and into
   dropout's elements. */
typedef struct li_head { int64_t queries, keys, q, k, v, out, row, element; } li_head;
LI_HOT li_head li_head_at(const li_attention *a, int64_t pair) {
  const int64_t b = pair / a->heads, h = pair % a->heads;
  int64_t batch = b, query = 0, key = 0, row = b * a->queries, keys = a->keys;
  li_head r;
  r.queries = a->queries;
  if (a->query_offsets) { /* A ragged batch stores one sequence after the other. */
    row = query = a->query_offsets[b];
    key = a->key_offsets[b];
    r.queries = a->query_offsets[b + 1] - query;
    keys = a->key_offsets[b + 1] - key;
    batch = 0;
  }
  keys = li_real_slots(a->lengths, b, keys);
  r.keys = li_max(0, li_min(keys, r.queries + a->right));
  r.q = batch * a->q_batch + query * a->q_row + h * a->q_head;
  r.k = batch * a->k_batch + key * a->k_row + h * a->k_head;
  r.v = batch * a->v_batch + key * a->v_row + h * a->v_head;
  r.out = batch * a->out_batch + query * a->out_row + h * a->out_head;
  r.row = row * a->heads + h;
  r.element = pair * a->queries * a->keys;
  return r;
}

/* ---- The band: which keys a query sees ---- */
/* Gives every attention a band -left <= j - i <= right, where LI_MAX_COUNT means no limit. */
LI_FN void li_attention_band(li_attention *a) {
  if (!a->window) a->left = a->right = LI_MAX_COUNT;
  a->left = li_max(-LI_MAX_COUNT, li_min(a->left, LI_MAX_COUNT));
  a->right = li_max(-LI_MAX_COUNT, li_min(a->right, LI_MAX_COUNT));
  if (a->causal) a->right = li_min(a->right, 0);
}
LI_HOT bool li_is_banded(const li_attention *a) { return a->left < LI_MAX_COUNT || a->right < LI_MAX_COUNT; }
/* The keys [from, to); none if from >= to. */
typedef struct li_span { int64_t from, to; } li_span;
/* Returns the keys that any query in [first, last) sees. */
LI_HOT li_span li_seen(const li_attention *a, const li_head *head, int64_t first, int64_t last) {
  const li_span span = { li_max(0, first - a->left), li_min(head->keys, last + a->right) };
  return span;
}

/* ---- The reference, per head and query: q [queries, d], k [keys, d], v [keys, dv] -> out [queries, dv] ---- */
LI_FN double li_attention_score(const li_attention *a, const li_head *head, int64_t query, int64_t key) {
  return (double)a->scale * li_inner_by(li_attention_bf16(a), a->head_dim, a->q + head->q + query * a->q_row,
                                        1, a->k + head->k + key * a->k_row, 1);
}

/* out = sum_j p_j v_j, p = softmax(scale q K^T) [eq. 1]. V's columns are done 64 at a time, with sums in double. */
LI_FN void li_attention_row(const li_attention *a, const li_head *head, int64_t query) {
  const li_dropout dropout = li_attention_dropout(a);
  const li_span seen = li_seen(a, head, query, query + 1);
  const int64_t out = head->out + query * a->out_row, stat = head->row + query * a->heads;
  const bool bf16 = li_attention_bf16(a);
  double max = -(double)INFINITY, total = 0, kept = 0;
  if (seen.from >= seen.to) { /* No key */
    memset(a->out + out, 0, li_bytes(a->value_dim));
    if (a->log_sum_exp) a->log_sum_exp[stat] = -INFINITY;
    if (a->sums) a->sums[stat] = 0;
    return;
  }
  for (int64_t j = seen.from; j < seen.to; j++) {
    const double score = li_attention_score(a, head, query, j);
    if (!(score <= max)) max = score;
  }

  for (int64_t first = 0; first == 0 || first < a->value_dim; first += 64) {
    const int64_t n = li_min(64, a->value_dim - first);
    double sum[64] = {0};
    total = kept = 0;
    for (int64_t j = seen.from; j < seen.to; j++) {
      const float *v = a->v + head->v + j * a->v_row + first;
      const double p = (double)li_exp1_scalar((float)(li_attention_score(a, head, query, j) - max));
      const double masked = p * (double)li_dropout_at(&dropout, head->element + query * a->keys + j);
      const double weight = bf16 ? (double)li_bf16_of((float)masked) : masked;
      total += p;
      kept += masked;
      for (int64_t e = 0; e < n; e++) sum[e] += weight * (double)(bf16 ? li_bf16_of(v[e]) : v[e]);
    }
    for (int64_t e = 0; e < n; e++) a->out[out + first + e] = (float)(sum[e] / total);
  }

  if (a->log_sum_exp) a->log_sum_exp[stat] = (float)(max + (double)li_log1_scalar((float)total));
  if (a->sums) a->sums[stat] = (float)(kept / total);
}

LI_FN void li_attention_reference(const li_attention *a) {
  for (int64_t pair = 0; pair < a->batch * a->heads; pair++) {
    const li_head head = li_head_at(a, pair);
    for (int64_t query = 0; query < head.queries; query++) li_attention_row(a, &head, query);
  }
}
#endif

#ifdef LI_PASS_LOOPS
/* Folds n floats by halves into one vector. */
LI_INLINE vf LI_K(fold)(float *x, int64_t n) {
  for (int64_t half = n / 2; half >= VF; half /= 2)
    for (int64_t i = 0; i < half; i += VF) vf_store(x + i, vf_add(vf_load(x + i), vf_load(x + i + half)));
  return vf_load(x);
}

/* Replaces x by exp(x - top) times the mask. `sum` adds the values before the mask, `kept` those after. */
LI_INLINE void LI_K(softmax_step)(float *x, vf top, const float *mask, float *sum, float *kept) {
  vf p = vf_exp(vf_sub(vf_load(x), top));
  vf_store(sum, vf_add(vf_load(sum), p));
  if (mask) {
    p = vf_mul(p, vf_load(mask));
    vf_store(kept, vf_add(vf_load(kept), p));
  }
  vf_store(x, p);
}

/* The softmax of eq. 1, e^(s - top) / sum of e^(s - top), without the division, which attention_finish does. Scores
   become numerators times the mask. stats gets each query's maximum, the sum before the mask and the sum after it. Sums
   go by 16 classes of keys, then by halves, as in vf_sum. */
LI_FN void LI_K(tile_softmax)(const li_tile *t, float *s, const float *mask, float *stats) {
  const int64_t depth = t->depth, width = t->width, step = t->step;
  for (int64_t i = 0; i < width; i += VF) {
    float sum[16 * VF] = {0}, kept[16 * VF] = {0};
    vf top = vf_set(-INFINITY);
    for (int64_t j = 0; j < depth; j++) top = vf_max(top, vf_load(s + j * step + i));
    for (int64_t j = 0; j < depth; j++)
      LI_K(softmax_step)(s + j * step + i, top, mask ? mask + j * step + i : NULL, sum + j % 16 * VF,
                         kept + j % 16 * VF);
    vf_store(stats + i, top);
    vf_store(stats + LI_TILE + i, LI_K(fold)(sum, 16 * VF));
    vf_store(stats + 2 * LI_TILE + i, LI_K(fold)(kept, 16 * VF));
  }
}

/* In line j of x, sets the elements before `from` + j, and from `to` + j on, to `value`. */
LI_FN void LI_K(tile_hide)(int64_t lines, const li_tile *t, int64_t from, int64_t to, float value, float *x) {
  const int64_t width = t->width, step = t->step;
  for (int64_t j = 0; j < lines; j++, x += step)
    for (int64_t i = 0; i < width; i += VF) {
      const vf at = vf_load(LI_K(lanes)), low = vf_set((float)(from + j - i)), high = vf_set((float)(to + j - i));
      const vf kept = vf_select(vf_lt(at, high), vf_load(x + i), vf_set(value));
      vf_store(x + i, vf_select(vf_lt(at, low), vf_set(value), kept));
    }
}

/* Merges a block's partial result into that of the earlier blocks. `state` has the layout of stats. */
LI_FN void LI_K(attention_merge)(li_matrix part, const float *stats, float *state, float *out, int64_t out_row) {
  const int64_t width = part.rows, dim = part.columns;
  for (int64_t i = 0; i < width; i++) {
    const float top = state[i] > stats[i] ? state[i] : stats[i];
    const float old = LI_K(exp1)(state[i] - top), add = LI_K(exp1)(stats[i] - top);
    float *row = out + i * out_row;
    state[i] = top;
    for (int64_t j = 1; j < 3; j++)
      state[j * LI_TILE + i] = state[j * LI_TILE + i] * old + stats[j * LI_TILE + i] * add;
    for (int64_t j = 0; j < dim; j += VF) {
      const vf x = vf_mul(LI_K(get)(row + j, dim - j), vf_set(old));
      LI_K(put)(row + j, vf_fma(LI_K(get)(part.at + i * dim + j, dim - j), vf_set(add), x), dim - j);
    }
  }
}

/* Divides the rows, and the sums after the mask in `state`, by the rows' sums. The maxima become log-sum-exps. */
LI_FN void LI_K(attention_finish)(int64_t width, int64_t dim, float *state, float *out, int64_t out_row) {
  for (int64_t i = 0; i < width; i++, out += out_row) {
    const float sum = state[LI_TILE + i], factor = 1 / sum;
    for (int64_t j = 0; j < dim; j += VF)
      LI_K(put)(out + j, vf_mul(LI_K(get)(out + j, dim - j), vf_set(factor)), dim - j);
    state[i] += LI_K(log1)(sum);
    state[2 * LI_TILE + i] *= factor;
  }
}

/* Turns scores into P m and slopes dP into dS = P (dP m - delta), without the scale. stats has each query's
   log-sum-exp, delta, and what is added to dP before the mask. */
LI_FN void LI_K(tile_slopes)(const li_tile *t, float *s, float *slopes, const float *mask, const float *stats) {
  const int64_t depth = t->depth, width = t->width, step = t->step;
  for (int64_t i = 0; i < depth; i++)
    for (int64_t j = 0; j < width; j += VF) {
      const int64_t at = i * step + j;
      const vf p = vf_exp(vf_sub(vf_load(s + at), vf_load(stats + j)));
      vf g = vf_load(slopes + at), kept = p;
      if (mask) {
        const vf m = vf_load(mask + at);
        g = vf_mul(vf_add(g, vf_load(stats + 2 * LI_TILE + j)), m);
        kept = vf_mul(p, m);
      }
      vf_store(s + at, kept);
      vf_store(slopes + at, vf_mul(p, vf_sub(g, vf_load(stats + LI_TILE + j))));
    }
}

#elif !defined(LI_PASS)

#define LI_RUN 256           /* A forward item has at most this many queries. */
#define LI_HIDDEN (-3.0e38f) /* Hidden scores are finite, so a block of them gives no NaN. */

typedef struct li_attention_work {
  const li_kernels *kernels;
  const li_attention *a;
  char *scratch;              /* It holds the threads' spaces, then `partial`. */
  size_t thread_bytes;
  int64_t queries, keys;      /* Largest per batch row */
  int64_t pairs, blocks, run; /* A pair is (batch row, head); it has `blocks` key blocks, and an item `run` queries. */
  int64_t tile;               /* A tile's queries, at most */
  int64_t query_blocks;       /* In backward, at most this many query blocks see a key block. */
  int64_t wave, first, last;  /* In backward, a wave has this many units (pair, key block), now [first, last). */
  int64_t unit;               /* A unit keeps this many floats in `partial`. */
  float *partial;
  bool q_shared, k_shared, v_shared; /* Shared by the batch */
  bool backward;
  int64_t parts;              /* Parts that gather gradients */
} li_attention_work;

/* A thread's part of scratch, laid out by li_attention_layout. Null means not needed. */
typedef struct li_attention_space {
  float *scores, *slopes, *mask, *mask_row, *clean, *score_panels, *slope_panels, *values, *product;
  float *own, *part, *stats, *state;
  float *words; /* li_panels' words */
} li_attention_space;

/* Zeroes the end of each line, since kernels read beyond it. */
LI_HOT void li_tile_pad(const li_tile *t, float *x) {
  if (t->width % 16 == 0) return;
  for (int64_t i = 0; i < t->depth; i++)
    for (int64_t j = t->width; j % 16 != 0; j++) x[i * t->step + j] = 0;
}

/* Sets the scores of keys that a query does not see to `value`, in some keys' lines. li_tile_hide does the keys before
   some query's band, then those after it. */
LI_HOT void li_tile_hide_lines(const li_kernels *kernels, const li_tile *t, const li_attention *a, int64_t first,
                               int64_t last, float value, float *x) {
  const int64_t key = t->key + first - t->query;
  const int64_t from = li_max(key - a->right, -LI_KEY_BLOCK), to = li_min(key + a->left + 1, t->width);
  if (last > first) kernels->tile_hide(last - first, t, from, to, value, x + first * t->step);
}
LI_HOT void li_tile_hide(const li_kernels *kernels, const li_tile *t, const li_attention *a, float value, float *x) {
  const int64_t before = li_max(0, li_min(t->query + t->width - 1 - a->left - t->key, t->depth));
  const int64_t after = li_max(before, li_min(t->query + 1 + a->right - t->key, t->depth));
  li_tile_hide_lines(kernels, t, a, 0, before, value, x);
  li_tile_hide_lines(kernels, t, a, after, t->depth, value, x);
}

/* Lays out a thread's space, starting at `scratch`, and returns its end. */
LI_FN char *li_attention_layout(const li_attention_work *w, char *scratch, li_attention_space *m) {
  const li_kernels *kernels = w->kernels;
  const li_attention *a = w->a;
  const int64_t d = a->head_dim, dv = a->value_dim, depth = li_min(w->keys, LI_KEY_BLOCK), scores = LI_TILE * depth;
  const bool back = w->backward;
  const int64_t tiles = back ? 1 : w->run / w->tile;
  memset(m, 0, sizeof *m);
  m->scores = li_take(&scratch, scores);
  if (li_is_banded(a)) m->clean = li_take(&scratch, depth * (back ? d : dv));
  m->score_panels = li_take(&scratch, tiles * li_panels_size(kernels, w->tile, d));
  if (li_drops(a)) {
    m->mask = li_take(&scratch, scores);
    m->mask_row = li_take(&scratch, depth);
  }
  if (back) {
    m->values = li_take(&scratch, li_panels_size(kernels, d, depth)); /* The keys, for dQ */
    m->slopes = li_take(&scratch, scores);
    m->slope_panels = li_take(&scratch, li_panels_size(kernels, LI_TILE, dv));
    m->product = li_take(&scratch, li_panels_size(kernels, li_max(d, dv), LI_TILE));
    m->own = li_take(&scratch, depth * (d + dv));
  } else {
    m->values = li_take(&scratch, li_panels_size(kernels, dv, depth));
    m->part = li_take(&scratch, LI_TILE * dv);
    m->stats = li_take(&scratch, 3 * LI_TILE);
    m->state = li_take(&scratch, tiles * 3 * LI_TILE);
  }
  if (li_attention_bf16(a)) m->words = li_take(&scratch, li_words_size(kernels, true));
  return scratch;
}

/* Returns the number of queries in a unit's partial dQ. */
LI_HOT int64_t li_unit_queries(const li_attention_work *w) {
  return li_min(w->queries, w->query_blocks * LI_KEY_BLOCK);
}

/* Finds the largest sizes and splits the work among `threads`, which changes no bit. Returns the bytes of scratch. */
LI_FN size_t li_attention_start(li_attention_work *w, const li_kernels *kernels, const li_attention *a,
                                int64_t threads, bool backward, void *scratch) {
  li_attention_space space;
  char *zero = (char *)w; /* Only differences of pointers matter. */
  memset(w, 0, sizeof *w);
  w->kernels = kernels;
  w->a = a;
  w->backward = backward;
  w->parts = threads;
  w->pairs = a->batch * a->heads;
  w->q_shared = !a->query_offsets && a->q_batch == 0 && a->batch > 1;
  w->k_shared = !a->key_offsets && a->k_batch == 0 && a->batch > 1;
  w->v_shared = !a->key_offsets && a->v_batch == 0 && a->batch > 1;

  w->queries = a->queries;
  w->keys = a->keys;
  if (a->query_offsets) {
    w->queries = w->keys = 0;
    for (int64_t b = 0; b < a->batch; b++) {
      w->queries = li_max(w->queries, a->query_offsets[b + 1] - a->query_offsets[b]);
      w->keys = li_max(w->keys, a->key_offsets[b + 1] - a->key_offsets[b]);
    }
  }

  w->keys = li_max(0, li_min(w->keys, w->queries + a->right));
  w->blocks = li_divide_up(w->keys, LI_KEY_BLOCK);
  w->run = LI_RUN;
  /* A window's small tiles compute fewer hidden scores. */
  w->tile = a->left + a->right < 4 * LI_KEY_BLOCK ? LI_TILE / 2 : LI_TILE;
  while (w->run > LI_TILE && w->pairs * li_divide_up(w->queries, w->run) < 4 * threads) w->run /= 2;

  /* Queries in [key - right, key + LI_KEY_BLOCK + left) see a key of the block. */
  w->query_blocks = li_min(li_divide_up(w->queries, LI_KEY_BLOCK),
                           li_divide_up(li_max(1, LI_KEY_BLOCK + a->left + a->right), LI_KEY_BLOCK) + 1);
  w->wave = li_min(w->pairs * w->blocks, li_divide_up(2 * threads, li_max(w->query_blocks, 1)));
  w->unit = li_unit_queries(w) * a->head_dim;
  if (w->query_blocks > 1 || w->k_shared || w->v_shared)
    w->unit += w->query_blocks * li_min(w->keys, LI_KEY_BLOCK) * (a->head_dim + a->value_dim);

  w->thread_bytes = (size_t)(li_attention_layout(w, zero, &space) - zero);
  w->scratch = (char *)scratch;
  if (scratch) w->partial = (float *)(void *)(w->scratch + (size_t)threads * w->thread_bytes);
  if (!backward) w->wave = 0;
  return (size_t)threads * w->thread_bytes + (size_t)li_floats(w->wave * w->unit);
}

/* Returns the block's keys that queries in [first, last) see. */
LI_HOT li_span li_block_seen(const li_attention *a, const li_head *head, int64_t block, int64_t first, int64_t last) {
  li_span span = li_seen(a, head, first, last);
  span.from = li_max(span.from, block * LI_KEY_BLOCK);
  span.to = li_min(span.to, (block + 1) * LI_KEY_BLOCK);
  return span;
}
LI_HOT int64_t li_first_query(const li_attention *a, int64_t block) {
  return li_max(0, block * LI_KEY_BLOCK - a->right) / LI_KEY_BLOCK * LI_KEY_BLOCK;
}

/* Tells whether only one unit writes these keys' gradients. */
LI_HOT bool li_direct(const li_head *head, bool shared) { return !shared && head->queries <= LI_KEY_BLOCK; }

/* A unit stores dQ [queries, head_dim] from its first query block on, then dK [keys, head_dim] and dV [keys, value_dim]
   of each query block, numbered from that one on. */
LI_HOT float *li_grad_part(const li_attention_work *w, int64_t unit, int64_t query_block) {
  return w->partial + (unit - w->first) * w->unit + li_unit_queries(w) * w->a->head_dim +
         query_block * li_min(w->keys, LI_KEY_BLOCK) * (w->a->head_dim + w->a->value_dim);
}

LI_FN li_matrix li_scores(const li_tile *t, const float *s) { /* [width, depth] */
  return li_transposed(li_strided(s, t->depth, t->width, t->step));
}
/* s = factor Y X^T, in a tile's layout. `panels` holds X, whose rows belong to the tile's queries; Y's rows belong to
   its keys. */
LI_HOT void li_tile_product(const li_kernels *kernels, const li_tile *t, float factor, li_matrix y,
                            const float *panels, float *s, float *words) {
  li_matmul_panels(kernels, factor, y, li_words_in(kernels, panels, t->width, y.columns, words),
                   li_into(s, t->step, false));
  li_tile_pad(t, s);
}

LI_HOT void li_tile_mask(const li_kernels *kernels, const li_attention *a, const li_head *head, const li_tile *t,
                         const li_attention_space *m) {
  const li_dropout dropout = li_attention_dropout(a);
  for (int64_t i = 0; i < t->width; i++) {
    kernels->dropout_mask(&dropout, head->element + (t->query + i) * a->keys + t->key, t->depth, m->mask_row);
    for (int64_t j = 0; j < t->depth; j++) m->mask[j * t->step + i] = m->mask_row[j];
  }
  li_tile_pad(t, m->mask);
}

/* Copies x to y with 0 for NaN and Inf, which would give NaN even times a weight of 0. */
LI_FN li_matrix li_finite_copy(li_matrix x, float *y) {
  for (int64_t i = 0; i < x.rows; i++)
    for (int64_t j = 0; j < x.columns; j++) {
      const float v = x.at[i * x.row + j];
      y[i * x.columns + j] = li_is_finite(v) ? v : 0;
    }
  return li_dense(y, x.rows, x.columns);
}
/* Adds the products that li_finite_copy left out to the rows of S V. Rows j + from to j + to - 1 see row j of V. */
LI_HOT void li_add_infinite(li_matrix s, li_matrix v, int64_t from, int64_t to, li_out out) {
  for (int64_t j = 0; j < s.columns; j++)
    for (int64_t c = 0; c < v.columns; c++) {
      const float x = v.at[j * v.row + c];
      if (li_is_finite(x)) continue;
      for (int64_t i = li_max(j + from, 0); i < li_min(j + to, s.rows); i++)
        out.at[i * out.row + c] += s.at[i * s.row + j * s.column] * x;
    }
}

/* Divides the tile's rows by their sums and writes its statistics. The reference computes the rows that see no key, or
   only scores as low as hidden ones. */
LI_HOT void li_attention_finish(const li_attention_work *w, const li_head *head, int64_t query, float *state) {
  const li_attention *a = w->a;
  const int64_t width = li_min(w->tile, head->queries - query);
  const li_span seen = li_seen(a, head, query, query + width);
  const bool some = seen.from < seen.to;
  float *out = a->out + head->out + query * a->out_row;
  if (some) w->kernels->attention_finish(width, a->value_dim, state, out, a->out_row);
  for (int64_t i = 0; i < width; i++) {
    const int64_t at = head->row + (query + i) * a->heads;
    if (!some || state[i] < 0.5f * LI_HIDDEN) {
      li_attention_row(a, head, query + i);
      continue;
    }
    if (a->log_sum_exp) a->log_sum_exp[at] = state[i];
    if (a->sums) a->sums[at] = li_drops(a) ? state[2 * LI_TILE + i] : 1;
  }
}

/* The part of a key block that a head's queries [first, last) see. `values` are V's rows, multiplied by probabilities,
   or in backward K's, multiplied by slopes. */
typedef struct li_attention_block {
  int64_t first, last;
  int64_t key, depth; /* Some query sees these keys. */
  li_matrix k, v, values;
  bool edge;      /* Some query does not see some key. */
  bool nonfinite; /* Some value was not finite; `values` has 0 there. */
  bool copied;    /* Several tiles read values, which lie in panels. */
} li_attention_block;

/* Returns the tile of the block's queries from `query` on, with the keys that any of them may see; its depth is 0 if
   there are none. It starts a multiple of 32 keys after the block, where panels that pair two keys can be cut. */
LI_FN li_tile li_tile_at(const li_attention_work *w, const li_attention_block *b, int64_t query) {
  li_tile t;
  t.query = query;
  t.width = li_min(w->tile, b->last - query);
  t.key = b->key + li_max(0, query - w->a->left - b->key) / 32 * 32;
  t.depth = li_max(0, li_min(b->key + b->depth, query + t.width + w->a->right) - t.key);
  t.step = li_divide_up(t.width, 16) * 16;
  return t;
}

/* Returns false if the queries see nothing of the block. */
LI_FN bool li_attention_meet(const li_attention_work *w, const li_attention_space *m, const li_head *head,
                             int64_t first, int64_t last, int64_t block, li_attention_block *b) {
  const li_kernels *kernels = w->kernels;
  const li_attention *a = w->a;
  b->first = first;
  b->last = last;
  const li_span seen = li_block_seen(a, head, block, first, last);
  b->key = seen.from;
  b->depth = seen.to - seen.from;
  if (first >= last || b->depth <= 0) return false;
  b->k = li_strided(a->k + head->k + b->key * a->k_row, b->depth, a->head_dim, a->k_row);
  b->v = li_strided(a->v + head->v + b->key * a->v_row, b->depth, a->value_dim, a->v_row);
  b->values = b->v;
  if (w->backward) b->values = b->k;
  b->edge = b->key + b->depth > first + 1 + a->right || b->key < last - 1 - a->left;
  b->nonfinite = b->edge && !kernels->all_finite(b->values);
  if (b->nonfinite) b->values = li_finite_copy(b->values, m->clean);
  b->copied = last - first > w->tile;
  if (b->copied) li_words_of(kernels, b->values, m->values, m->words);
  return true;
}
/* to = factor S values, where S is a tile's probabilities or slopes. */
LI_FN void li_attention_values(const li_kernels *kernels, const li_attention_space *m, const li_attention_block *b,
                               const li_tile *t, float factor, li_matrix s, li_out to) {
  const int64_t first = t->key - b->key;
  if (!b->copied) {
    const li_matrix values = li_lines(b->values, first, first + t->depth);
    li_matmul_words(kernels, factor, s, values, to, m->values, m->words);
    return;
  }
  li_panels panels = li_words_in(kernels, m->values, b->values.columns, b->depth, m->words);
  panels.at += first / li_products_of(kernels, m->words != NULL)->pair * panels.row;
  li_matmul_panels(kernels, factor, s, panels, to);
}

/* Applies a block to the tile of queries from `query` on, whose panels are given: s [width, depth] = scale q k^T, then
   out [width, dv] = p v, merged with the earlier blocks. */
LI_FN void li_attention_tile(const li_attention_work *w, const li_attention_space *m, const li_head *head,
                             const li_attention_block *b, int64_t query, const float *panels) {
  const li_kernels *kernels = w->kernels;
  const li_attention *a = w->a;
  const int64_t dv = a->value_dim;
  const li_tile t = li_tile_at(w, b, query);
  const int64_t first = t.key - b->key;
  /* An earlier block was merged. */
  const bool merge = li_max(0, query - a->left) / LI_KEY_BLOCK < b->key / LI_KEY_BLOCK;
  const li_matrix s = li_scores(&t, m->scores);
  float *out = a->out + head->out + query * a->out_row;
  float *state = m->state + 3 * LI_TILE * ((query - b->first) / w->tile), *stats = state;
  li_out to = li_into(out, a->out_row, false);
  if (t.depth == 0) return;
  if (merge) {
    to = li_into(m->part, dv, false);
    stats = m->stats;
  }

  li_tile_product(kernels, &t, a->scale, li_lines(b->k, first, first + t.depth), panels, m->scores, m->words);
  if (b->edge) li_tile_hide(kernels, &t, a, LI_HIDDEN, m->scores);
  if (m->mask) li_tile_mask(kernels, a, head, &t, m);
  kernels->tile_softmax(&t, m->scores, m->mask, stats);
  li_attention_values(kernels, m, b, &t, 1, s, to);
  if (b->nonfinite) {
    const int64_t ahead = t.key - query;
    li_add_infinite(s, li_lines(b->v, first, first + t.depth), ahead - a->right, ahead + a->left + 1, to);
  }
  if (merge) kernels->attention_merge(li_dense(m->part, t.width, dv), stats, state, out, a->out_row);
}

/* Applies all key blocks to a run of a pair's queries, from `first` on. */
LI_FN void li_attention_item(const li_attention_work *w, const li_attention_space *m, int64_t pair, int64_t first) {
  const li_attention *a = w->a;
  const li_head head = li_head_at(a, pair);
  const int64_t last = li_min(first + w->run, head.queries);
  const int64_t tile = w->tile, step = li_panels_size(w->kernels, tile, a->head_dim);
  const li_matrix q = li_strided(a->q + head.q, head.queries, a->head_dim, a->q_row);
  float *panels = m->score_panels;
  li_attention_block b;
  for (int64_t query = first; query < last; query += tile, panels += step)
    li_words_of(w->kernels, li_transposed(li_lines(q, query, li_min(query + tile, last))), panels, m->words);
  int64_t block = li_seen(a, &head, first, last).from / LI_KEY_BLOCK;
  for (; block < w->blocks && li_attention_meet(w, m, &head, first, last, block, &b); block++) {
    panels = m->score_panels;
    for (int64_t query = first; query < last; query += tile, panels += step)
      li_attention_tile(w, m, &head, &b, query, panels);
  }
  for (int64_t query = first; query < last; query += tile)
    li_attention_finish(w, &head, query, m->state + 3 * LI_TILE * ((query - first) / tile));
}

/* Items are (pair, run of queries). */
LI_FN void li_attention_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_attention_work *w = (const li_attention_work *)work;
  const int64_t runs = li_divide_up(w->queries, w->run);
  li_attention_space space;
  li_attention_layout(w, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (int64_t item = first; item < last; item++) {
    const int64_t pair = item / runs, query = item % runs * w->run;
    if (query < li_head_at(w->a, pair).queries) li_attention_item(w, &space, pair, query);
  }
}

/* Fills stats with each query's log-sum-exp, with delta = dO . O, and with the gradient of the row's sum if dropout
   makes that vary; delta then includes its part. */
LI_HOT void li_attention_rows(const li_kernels *kernels, const li_attention *a, const li_head *head,
                              const li_tile *t, float *stats) {
  float *lse = stats, *delta = stats + LI_TILE, *add = stats + 2 * LI_TILE;
  memset(stats, 0, 3 * LI_TILE * sizeof *stats);
  for (int64_t i = 0; i < t->width; i++) {
    const int64_t query = t->query + i, at = head->row + query * a->heads;
    const int64_t out = head->out + query * a->out_row;
    lse[i] = a->log_sum_exp[at];
    delta[i] = kernels->dot(a->value_dim, a->grad_out + out, a->out + out);
    if (a->grad_log_sum_exp) delta[i] -= a->grad_log_sum_exp[at];
    if (!a->grad_sums || !li_drops(a)) continue;
    add[i] = a->grad_sums[at];
    delta[i] += add[i] * a->sums[at];
  }
}

LI_HOT void li_add_rows(const li_kernels *kernels, int64_t rows, int64_t n, const float *x, float *y, int64_t y_row) {
  for (int64_t i = 0; i < rows; i++) kernels->add(n, y + i * y_row, x + i * n, y + i * y_row);
}

/* Computes a unit's partial gradients of one query block that may see it. */
LI_FN void li_attention_backward_item(const li_attention_work *w, const li_attention_space *m, int64_t unit,
                                      int64_t query_block) {
  const li_kernels *kernels = w->kernels;
  const li_attention *a = w->a;
  const li_head head = li_head_at(a, unit / w->blocks);
  const int64_t d = a->head_dim, dv = a->value_dim;
  const int64_t start = li_first_query(a, unit % w->blocks);
  const int64_t first = start + query_block * LI_KEY_BLOCK, last = li_min(first + LI_KEY_BLOCK, head.queries);
  li_attention_block b;
  if (!li_attention_meet(w, m, &head, first, last, unit % w->blocks, &b)) return;
  const int64_t key = b.key, depth = b.depth;
  const bool k_direct = li_direct(&head, w->k_shared), v_direct = li_direct(&head, w->v_shared);
  float *dq = w->partial + (unit - w->first) * w->unit, *dk = li_grad_part(w, unit, query_block);
  float *dvalue = dk + depth * d, stats[3 * LI_TILE];
  if (k_direct) dk = m->own;
  if (v_direct) dvalue = m->own + depth * d;
  if (li_is_banded(a)) {
    memset(dk, 0, li_bytes(depth * d));
    memset(dvalue, 0, li_bytes(depth * dv));
  }
  for (int64_t query = first; query < last; query += w->tile) {
    const li_tile t = li_tile_at(w, &b, query);
    const bool more = query > first || li_is_banded(a);
    const int64_t from = t.key - key, to = from + t.depth;
    const li_matrix q = li_strided(a->q + head.q + query * a->q_row, t.width, d, a->q_row);
    const li_matrix g = li_strided(a->grad_out + head.out + query * a->out_row, t.width, dv, a->out_row);
    const li_matrix p = li_scores(&t, m->scores), ds = li_scores(&t, m->slopes);
    if (t.depth == 0) continue;

    li_words_of(kernels, li_transposed(q), m->score_panels, m->words);
    li_words_of(kernels, li_transposed(g), m->slope_panels, m->words);
    li_tile_product(kernels, &t, a->scale, li_lines(b.k, from, to), m->score_panels, m->scores, m->words);
    li_tile_product(kernels, &t, 1, li_lines(b.v, from, to), m->slope_panels, m->slopes, m->words);
    li_attention_rows(kernels, a, &head, &t, stats);
    if (m->mask) li_tile_mask(kernels, a, &head, &t, m);
    kernels->tile_slopes(&t, m->scores, m->slopes, m->mask, stats);
    if (b.edge) li_tile_hide(kernels, &t, a, 0, m->scores);
    if (b.edge) li_tile_hide(kernels, &t, a, 0, m->slopes);

    if (a->grad_v)
      li_matmul_words(kernels, 1, li_transposed(p), g, li_into(dvalue + from * dv, dv, more), m->product, m->words);
    if (a->grad_k)
      li_matmul_words(kernels, a->scale, li_transposed(ds), q, li_into(dk + from * d, d, more), m->product, m->words);
    if (a->grad_q) li_attention_values(kernels, m, &b, &t, a->scale, ds, li_into(dq + (query - start) * d, d, false));
  }
  if (a->grad_k && k_direct) li_add_rows(kernels, depth, d, dk, a->grad_k + head.k + key * a->k_row, a->k_row);
  if (a->grad_v && v_direct) li_add_rows(kernels, depth, dv, dvalue, a->grad_v + head.v + key * a->v_row, a->v_row);
}

LI_FN void li_attention_backward_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_attention_work *w = (const li_attention_work *)work;
  li_attention_space space;
  li_attention_layout(w, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (int64_t item = first; item < last; item++)
    li_attention_backward_item(w, &space, w->first + item / w->query_blocks, item % w->query_blocks);
}

/* Adds up a unit's dK or dV in the order of query blocks. */
LI_HOT void li_attention_merge_keys(const li_attention_work *w, int64_t unit, bool keys) {
  const li_kernels *kernels = w->kernels;
  const li_attention *a = w->a;
  const li_head head = li_head_at(a, unit / w->blocks);
  const int64_t block = unit % w->blocks, start = li_first_query(a, block);
  for (int64_t i = 0; i < w->query_blocks && start + i * LI_KEY_BLOCK < head.queries; i++) {
    const int64_t first = start + i * LI_KEY_BLOCK, last = li_min(first + LI_KEY_BLOCK, head.queries);
    const li_span seen = li_block_seen(a, &head, block, first, last);
    const int64_t key = seen.from, depth = seen.to - seen.from;
    const float *part = li_grad_part(w, unit, i);
    if (depth <= 0) continue;
    if (keys) li_add_rows(kernels, depth, a->head_dim, part, a->grad_k + head.k + key * a->k_row, a->k_row);
    else li_add_rows(kernels, depth, a->value_dim, part + depth * a->head_dim, a->grad_v + head.v + key * a->v_row,
                     a->v_row);
  }
}

/* Adds a tile of a unit's partial dQ. */
LI_HOT void li_attention_merge_queries(const li_attention_work *w, int64_t unit, int64_t query) {
  const li_attention *a = w->a;
  const li_head head = li_head_at(a, unit / w->blocks);
  const int64_t width = li_min(w->tile, head.queries - query), block = unit % w->blocks;
  const int64_t start = li_first_query(a, block);
  const li_span seen = li_block_seen(a, &head, block, query, query + width);
  if (width > 0 && seen.from < seen.to)
    li_add_rows(w->kernels, width, a->head_dim,
                w->partial + (unit - w->first) * w->unit + (query - start) * a->head_dim,
                a->grad_q + head.q + query * a->q_row, a->q_row);
}

/* Adds the wave's partial gradients in the order of units, so a tensor that the batch shares gets its sum in batch
   order. k, v and q number where a unit's dK, dV and first tile of dQ go, and one thread adds all that goes to a
   number. If queries are the same tensor as keys or values, a whole head has one number. */
LI_HOT void li_attention_gather_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_attention_work *w = (const li_attention_work *)work;
  const li_attention *a = w->a;
  const bool by_head = a->grad_q && (a->grad_q == a->grad_k || a->grad_q == a->grad_v);
  const int64_t tiles = li_divide_up(w->queries, w->tile);
  (void)thread;
  for (int64_t unit = w->first; unit < w->last; unit++) {
    const int64_t pair = unit / w->blocks;
    const li_head head = li_head_at(a, pair);
    int64_t k = unit - w->first, v = k, q = (pair - w->first / w->blocks) * tiles;
    if (w->k_shared) k %= a->heads * w->blocks;
    if (w->v_shared) v %= a->heads * w->blocks;
    if (w->q_shared) q = pair % a->heads * tiles;
    if (by_head) k = v = q = pair % a->heads;

    if (a->grad_k && !li_direct(&head, w->k_shared) && li_dealt(k, w->parts, first, last))
      li_attention_merge_keys(w, unit, true);
    if (a->grad_v && !li_direct(&head, w->v_shared) && li_dealt(v, w->parts, first, last))
      li_attention_merge_keys(w, unit, false);
    for (int64_t tile = 0; a->grad_q && tile < tiles; tile++) {
      if (li_dealt(q, w->parts, first, last)) li_attention_merge_queries(w, unit, tile * w->tile);
      if (!by_head) q++;
    }
  }
}

LI_FN size_t li_attention_scratch(const li_kernels *kernels, const li_attention *a, int64_t threads, bool backward) {
  li_attention_work w;
  if (!kernels->panels) return 0;
  return li_attention_start(&w, kernels, a, li_max(threads, 1), backward, NULL);
}
/* q [batch, queries, heads, head_dim], k [batch, keys, heads, head_dim], v [batch, keys, heads, value_dim] ->
   out [batch, queries, heads, value_dim]. */
LI_FN void li_run_attention(const li_kernels *kernels, const li_attention *a,
                            const li_parallel *parallel, void *scratch) {
  li_attention_work w;
  if (!kernels->panels) {
    li_attention_reference(a);
    return;
  }
  li_attention_start(&w, kernels, a, li_threads(parallel), false, scratch);
  li_each(parallel, w.pairs * li_divide_up(w.queries, w.run), li_attention_task, &w);
}
/* grad_out [as out] -> grad_q, grad_k, grad_v [as q, k, v]. */
LI_FN void li_run_attention_backward(const li_kernels *kernels, const li_attention *a,
                                     const li_parallel *parallel, void *scratch) {
  li_attention_work w;
  LI_BY_BACKWARD_REFERENCE(kernels, li_attention_backward_reference(a); return);
  li_attention_start(&w, kernels, a, li_threads(parallel), true, scratch);
  for (; w.first < w.pairs * w.blocks; w.first = w.last) {
    w.last = li_min(w.first + w.wave, w.pairs * w.blocks);
    li_each(parallel, (w.last - w.first) * w.query_blocks, li_attention_backward_task, &w);
    li_each(parallel, w.parts, li_attention_gather_task, &w);
  }
}
#endif

/* ----------------
   >>unpack: the folded unpack (eq. 4), forward and backward: panels of 64 rows by all heads' slots at once
   li_unpack has the arguments and li_unpack_space is a thread's scratch. In order: the reference, the softmax of a
   panel and its derivative, the plan, the forward pass, the backward pass. Guarded by tests/kernels/attention.c.
   ---------------- */
#ifndef LI_PASS
/* The reference computes a row's probabilities p [heads, slots] before dropout [eq. 4]. */
LI_FN void li_unpack_row(const li_unpack *u, int64_t b, int64_t i, float *p) {
  const int64_t slots = li_real_slots(u->lengths, b, u->slots), row = b * u->rows + i;
  for (int64_t h = 0; h < u->heads; h++) {
    const int64_t at = (b * u->heads + h) * u->slots;
    float max = -INFINITY;
    double sum = 0;
    for (int64_t l = 0; l < slots; l++) {
      float *s = p + h * u->slots + l;
      *s = (float)(li_inner_by(u->bf16, u->dim, u->x + row * u->dim, 1, u->k + (at + l) * u->dim, 1) +
                   (double)u->bias[at + l]);
      if (!(*s <= max)) max = *s;
    }
    for (int64_t l = 0; l < slots; l++) sum += (double)li_exp1_scalar(p[h * u->slots + l] - max);
    const float lse = slots > 0 ? max + li_log1_scalar((float)sum) : 0;

    for (int64_t l = 0; l < slots; l++) p[h * u->slots + l] = li_exp1_scalar(p[h * u->slots + l] - lse);
    if (u->lse) u->lse[row * u->heads + h] = lse;
  }
}
LI_FN float li_unpack_mask_at(const li_unpack *u, int64_t b, int64_t h, int64_t i, int64_t l) {
  return li_dropout_at(&u->dropout, ((b * u->heads + h) * u->rows + i) * u->slots + l);
}

LI_FN void li_unpack_reference(const li_unpack *u, void *scratch) {
  float *p = (float *)scratch;
  for (int64_t b = 0; b < u->batch; b++)
    for (int64_t i = 0; i < u->rows; i++) {
      const int64_t row = (b * u->rows + i) * u->dim, slots = li_real_slots(u->lengths, b, u->slots);
      li_unpack_row(u, b, i, p);
      for (int64_t h = 0; h < u->heads; h++)
        for (int64_t l = 0; l < slots; l++) p[h * u->slots + l] *= li_unpack_mask_at(u, b, h, i, l);
      for (int64_t e = 0; e < u->dim; e++) {
        double sum = 0;
        if (u->out_bias) sum = (double)u->out_bias[e];
        for (int64_t h = 0; h < u->heads; h++)
          sum += li_inner_by(u->bf16, slots, p + h * u->slots, 1,
                             u->v + (b * u->heads + h) * u->slots * u->dim + e, u->dim);
        const float before = u->residual ? u->residual[row + e] : 0;
        u->out[row + e] = before + (float)sum * li_dropout_at(&u->last, row + e);
      }
    }
}
#endif

#ifdef LI_PASS_LOOPS
/* Computes eq. 4's softmax of n scores of a head in place: s <- e^(s + bias - lse). Returns lse, the logarithm of the
   sum of e^(s + bias). */
LI_INLINE float LI_K(group_softmax)(int64_t n, const float *bias, float *s) {
  const vf lowest = vf_set(-INFINITY);
  vf top = lowest, sum = vf_zero();
  for (int64_t i = 0; i < n; i += VF)
    top = vf_max(top, vf_add(LI_K(get_filled)(s + i, n - i, lowest), LI_GET(bias)));
  top = vf_set(vf_hmax(top));
  for (int64_t i = 0; i < n; i += VF) {
    const vf x = vf_exp(vf_sub(vf_add(LI_K(get_filled)(s + i, n - i, lowest), LI_GET(bias)), top));
    sum = vf_add(sum, x);
    LI_PUT(s, x);
  }
  sum = vf_set(vf_sum(sum));
  const vf factor = vf_div(vf_set(1), sum);
  for (int64_t i = 0; i < n; i += VF) LI_PUT(s, vf_mul(LI_GET(s), factor));
  return vf_first(vf_add(top, vf_log(sum)));
}

/* Rows are counted over the batch. */
LI_FN void LI_K(unpack_softmax)(const li_unpack *u, const li_unpack_space *m, int64_t row, int64_t rows) {
  const int64_t n = m->slots;
  float *s = m->scores;
  for (int64_t i = row; i < row + rows; i++)
    for (int64_t h = 0; h < u->heads; h++, s += n) {
      float lse = 0;
      if (n) lse = LI_K(group_softmax)(n, m->bias + h * n, s);
      if (u->lse) u->lse[i * u->heads + h] = lse;
    }
}

/* Replaces a head's scores s by P m and its slopes dP by dS = P (dP m - sum of P dP m). */
LI_INLINE void LI_K(group_slopes)(int64_t n, const float *bias, const float *mask, float lse, float *s, float *slopes) {
  vf delta = vf_zero();
  for (int64_t i = 0; i < n; i += VF) {
    const vf p = vf_exp(vf_sub(vf_add(LI_GET(s), LI_GET(bias)), vf_set(lse)));
    vf g = LI_GET(slopes);
    if (mask) g = vf_mul(g, LI_GET(mask));
    delta = vf_fma(p, g, delta);
    LI_PUT(s, p);
    LI_PUT(slopes, g);
  }
  delta = vf_set(vf_sum(delta));
  for (int64_t i = 0; i < n; i += VF) {
    const vf p = LI_GET(s);
    LI_PUT(slopes, vf_mul(p, vf_sub(LI_GET(slopes), delta)));
    if (mask) LI_PUT(s, vf_mul(p, LI_GET(mask)));
  }
}

LI_FN void LI_K(unpack_slopes)(const li_unpack *u, const li_unpack_space *m, int64_t row, int64_t rows) {
  const int64_t n = m->slots;
  int64_t at = 0;
  for (int64_t i = row; i < row + rows; i++)
    for (int64_t h = 0; h < u->heads; h++, at += n)
      LI_K(group_slopes)(n, m->bias + h * n, u->dropout.threshold ? m->mask + at : NULL, u->lse[i * u->heads + h],
                         m->scores + at, m->slopes + at);
}

#elif !defined(LI_PASS)
typedef struct li_unpack_work {
  const li_kernels *kernels;
  const li_unpack *u;
  char *scratch;
  size_t thread_bytes;
  /* There are `blocks` of LI_KEY_BLOCK rows. Backward, a wave has units (batch row, block). */
  int64_t blocks, first, last, unit;
  /* Each unit has dK and dV [heads slots, dim], dbias [heads slots] and dout_bias [dim]. */
  float *partial;
} li_unpack_work;
LI_FN li_unpack_space *li_unpack_own(const li_unpack_work *w, int64_t thread) {
  return (li_unpack_space *)(void *)(w->scratch + (size_t)thread * w->thread_bytes);
}

/* Lays out a thread's space in scratch, and returns where it ends. */
LI_FN char *li_unpack_layout(const li_kernels *kernels, const li_unpack *u, bool backward, char *scratch,
                             li_unpack_space *m) {
  const int64_t n = u->heads * u->slots, d = u->dim;
  memset(m, 0, sizeof *m);
  m->prepared = -1;
  if (u->lengths) {
    m->k = li_take(&scratch, n * d);
    m->v = li_take(&scratch, n * d);
  }
  m->bias = li_take(&scratch, n);
  m->score_panels = li_take(&scratch, li_panels_size(kernels, n, d));
  m->out_panels = li_take(&scratch, li_panels_size(kernels, d, n));
  m->scores = li_take(&scratch, LI_TILE * n);
  if (u->dropout.threshold) m->mask = li_take(&scratch, LI_TILE * n);
  if (LI_BF16(u)) m->words = li_take(&scratch, li_words_size(kernels, backward));
  if (!backward) return scratch;

  m->slope_panels = li_take(&scratch, li_panels_size(kernels, n, d));
  m->slopes = li_take(&scratch, LI_TILE * n);
  m->product = li_take(&scratch, li_panels_size(kernels, d, LI_TILE));
  if (u->last.threshold) m->grad = li_take(&scratch, LI_TILE * d);
  return scratch;
}

/* Sets the sizes and, unless scratch is null, the threads' spaces. Returns the bytes of scratch. */
LI_FN size_t li_unpack_start(li_unpack_work *w, const li_kernels *kernels, const li_unpack *u,
                             int64_t threads, bool backward, void *scratch) {
  li_unpack_space space;
  char *zero = (char *)w; /* Only distances count */
  memset(w, 0, sizeof *w);
  w->kernels = kernels;
  w->u = u;
  w->scratch = (char *)scratch;
  w->thread_bytes = li_round(sizeof space) + (size_t)(li_unpack_layout(kernels, u, backward, zero, &space) - zero);
  w->blocks = li_divide_up(u->rows, LI_KEY_BLOCK);
  if (backward) w->unit = u->heads * u->slots * (2 * u->dim + 1) + u->dim;
  for (int64_t t = 0; scratch && t < threads; t++)
    li_unpack_layout(kernels, u, backward, (char *)li_unpack_own(w, t) + li_round(sizeof space), li_unpack_own(w, t));
  if (scratch) w->partial = (float *)(void *)(w->scratch + (size_t)threads * w->thread_bytes);
  return (size_t)threads * w->thread_bytes + (size_t)li_floats(2 * threads * w->unit);
}

LI_FN size_t li_unpack_scratch(const li_kernels *kernels, const li_unpack *u, int64_t threads, bool backward) {
  li_unpack_work w;
  if (!kernels->panels) return (size_t)li_floats(u->heads * u->slots + u->dim);
  return li_unpack_start(&w, kernels, u, li_max(threads, 1), backward, NULL);
}

/* Packs K, V and the bias of batch row b, unless the thread's space has them already. */
LI_HOT void li_unpack_prepare(const li_kernels *kernels, const li_unpack *u, int64_t b, bool backward,
                              li_unpack_space *m) {
  const int64_t at = b * u->heads * u->slots, d = u->dim;
  const float *k = u->k + at * d, *v = u->v + at * d;
  if (m->prepared == b) return;
  m->prepared = b;
  m->slots = li_real_slots(u->lengths, b, u->slots);
  m->n = u->heads * m->slots;
  for (int64_t h = 0; h < u->heads; h++) {
    memcpy(m->bias + h * m->slots, u->bias + at + h * u->slots, li_bytes(m->slots));
    if (m->slots == u->slots) continue;
    memcpy(m->k + h * m->slots * d, k + h * u->slots * d, li_bytes(m->slots * d));
    memcpy(m->v + h * m->slots * d, v + h * u->slots * d, li_bytes(m->slots * d));
  }
  if (m->slots < u->slots) {
    k = m->k;
    v = m->v;
  }
  li_words_of(kernels, li_transposed(li_dense(k, m->n, d)), m->score_panels, m->words);
  li_words_of(kernels, li_dense(backward ? k : v, m->n, d), m->out_panels, m->words);
  if (backward) li_words_of(kernels, li_transposed(li_dense(v, m->n, d)), m->slope_panels, m->words);
}

LI_HOT void li_unpack_mask(const li_kernels *kernels, const li_unpack *u, const li_unpack_space *m,
                           int64_t b, int64_t first, int64_t rows) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t h = 0; h < u->heads; h++)
      kernels->dropout_mask(&u->dropout, ((b * u->heads + h) * u->rows + first + i) * u->slots, m->slots,
                            m->mask + i * m->n + h * m->slots);
}

/* x [rows, dim], k and v [n, dim] -> scores [rows, n], out [rows, dim], where n counts the slots of all heads. */
LI_FN void li_unpack_panel(const li_kernels *kernels, const li_unpack *u, const li_unpack_space *m,
                           int64_t b, int64_t first, int64_t rows) {
  const int64_t d = u->dim, n = m->n, row = b * u->rows + first;
  const float *residual = u->residual, *bias = u->out_bias;
  float *out = u->out + row * d;
  if (residual) residual += row * d;
  li_matmul_panels(kernels, 1, li_dense(u->x + row * d, rows, d),
                   li_words_in(kernels, m->score_panels, n, d, m->words), li_into(m->scores, n, false));
  kernels->unpack_softmax(u, m, row, rows);
  if (u->dropout.threshold) {
    li_unpack_mask(kernels, u, m, b, first, rows);
    kernels->mul(rows * n, m->scores, m->mask, m->scores);
  }

  /* The product is added to what out holds: the bias and, unless there is dropout between, the residual X of eq. 6. */
  const bool early = residual && !u->last.threshold;
  for (int64_t i = 0; i < rows; i++) {
    if (early && bias) kernels->add(d, residual + i * d, bias, out + i * d);
    else if (early) memcpy(out + i * d, residual + i * d, li_bytes(d));
    else if (bias) memcpy(out + i * d, bias, li_bytes(d));
  }
  li_matmul_panels(kernels, 1, li_dense(m->scores, rows, n),
                   li_words_in(kernels, m->out_panels, d, n, m->words), li_into(out, d, bias || early));
  if (!u->last.threshold) return;
  kernels->dropout(&u->last, row * d, rows * d, out, out, false);
  if (residual) kernels->add(rows * d, residual, out, out);
}

LI_FN void li_unpack_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_unpack_work *w = (const li_unpack_work *)work;
  const li_unpack *u = w->u;
  const int64_t panels = li_divide_up(u->rows, LI_TILE);
  li_unpack_space *m = li_unpack_own(w, thread);
  for (int64_t item = first; item < last; item++) {
    const int64_t row = item % panels * LI_TILE;
    li_unpack_prepare(w->kernels, u, item / panels, false, m);
    li_unpack_panel(w->kernels, u, m, item / panels, row, li_min(LI_TILE, u->rows - row));
  }
}

LI_FN void li_run_unpack(const li_kernels *kernels, const li_unpack *u, const li_parallel *parallel, void *scratch) {
  li_unpack_work w;
  if (!kernels->panels) {
    li_unpack_reference(u, scratch);
    return;
  }
  li_unpack_start(&w, kernels, u, li_threads(parallel), false, scratch);
  li_each(parallel, u->batch * li_divide_up(u->rows, LI_TILE), li_unpack_task, &w);
}

/* Adds a panel's dX, and its share of the unit's partial gradients. */
LI_FN void li_unpack_backward_panel(const li_unpack_work *w, const li_unpack_space *m, int64_t b,
                                    int64_t first, int64_t rows, float *part) {
  const li_kernels *kernels = w->kernels;
  const li_unpack *u = w->u;
  const int64_t d = u->dim, n = m->n, row = b * u->rows + first;
  const li_matrix x = li_dense(u->x + row * d, rows, d), p = li_dense(m->scores, rows, n);
  const li_matrix ds = li_dense(m->slopes, rows, n);
  li_matrix g = li_dense(u->grad_out + row * d, rows, d);
  float *bias = part + 2 * n * d;
  if (u->last.threshold) {
    kernels->dropout(&u->last, row * d, rows * d, g.at, m->grad, false);
    g.at = m->grad;
  }
  li_matmul_panels(kernels, 1, x, li_words_in(kernels, m->score_panels, n, d, m->words), li_into(m->scores, n, false));
  li_matmul_panels(kernels, 1, g, li_words_in(kernels, m->slope_panels, n, d, m->words), li_into(m->slopes, n, false));
  if (u->dropout.threshold) li_unpack_mask(kernels, u, m, b, first, rows);
  kernels->unpack_slopes(u, m, row, rows);
  for (int64_t i = 0; i < rows; i++) {
    kernels->add(n, bias, m->slopes + i * n, bias);
    kernels->add(d, bias + n, g.at + i * d, bias + n);
  }
  if (u->grad_k)
    li_matmul_words(kernels, 1, li_transposed(ds), x, li_into(part, d, true), m->product, m->words);
  if (u->grad_v)
    li_matmul_words(kernels, 1, li_transposed(p), g, li_into(part + n * d, d, true), m->product, m->words);
  if (!u->grad_x) return; /* This comes last, since grad_x may be grad_out. */
  li_matmul_panels(kernels, 1, ds, li_words_in(kernels, m->out_panels, d, n, m->words),
                   li_into(u->grad_x + row * d, d, true));
}

LI_FN void li_unpack_backward_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_unpack_work *w = (const li_unpack_work *)work;
  const li_unpack *u = w->u;
  li_unpack_space *m = li_unpack_own(w, thread);
  for (int64_t i = first; i < last; i++) {
    const int64_t unit = w->first + i, b = unit / w->blocks, start = unit % w->blocks * LI_KEY_BLOCK,
        end = li_min(start + LI_KEY_BLOCK, u->rows);
    float *part = w->partial + i * w->unit;
    li_unpack_prepare(w->kernels, u, b, true, m);
    memset(part, 0, li_bytes(w->unit));
    for (int64_t row = start; row < end; row += LI_TILE)
      li_unpack_backward_panel(w, m, b, row, li_min(LI_TILE, end - row), part);
  }
}

/* Adds the wave's partial gradients in order. Items are the slots of each head, then dout_bias. */
LI_HOT void li_unpack_gather_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_unpack_work *w = (const li_unpack_work *)work;
  const li_kernels *kernels = w->kernels;
  const li_unpack *u = w->u;
  const int64_t d = u->dim, items = u->heads * u->slots;
  (void)thread;
  for (int64_t item = first; item < last; item++)
    for (int64_t unit = w->first; unit < w->last; unit++) {
      const int64_t b = unit / w->blocks, at = b * items + item;
      const int64_t real = li_real_slots(u->lengths, b, u->slots), n = u->heads * real;
      const float *part = w->partial + (unit - w->first) * w->unit;
      if (item == items) {
        if (u->grad_out_bias) kernels->add(d, u->grad_out_bias, part + 2 * n * d + n, u->grad_out_bias);
        continue;
      }
      const int64_t from = item / u->slots * real + item % u->slots;
      if (item % u->slots < real) {
        if (u->grad_k) kernels->add(d, u->grad_k + at * d, part + from * d, u->grad_k + at * d);
        if (u->grad_v) kernels->add(d, u->grad_v + at * d, part + (n + from) * d, u->grad_v + at * d);
        if (u->grad_bias) u->grad_bias[at] += part[2 * n * d + from];
      }
    }
}

LI_FN void li_run_unpack_backward(const li_kernels *kernels, const li_unpack *u,
                                  const li_parallel *parallel, void *scratch) {
  const int64_t threads = li_threads(parallel), units = u->batch * li_divide_up(u->rows, LI_KEY_BLOCK);
  li_unpack_work w;
  LI_BY_BACKWARD_REFERENCE(kernels, li_unpack_backward_reference(u, scratch); return);
  li_unpack_start(&w, kernels, u, threads, true, scratch);
  for (; w.first < units; w.first = w.last) {
    w.last = li_min(w.first + 2 * threads, units);
    li_each(parallel, w.last - w.first, li_unpack_backward_task, &w);
    li_each(parallel, u->heads * u->slots + 1, li_unpack_gather_task, &w);
  }
}
#endif

/* ----------------
   >>causal: the causal product (eq. 7) and causal Luna [section 3.3], forward and backward, by chunks of LI_CHUNK rows
     F = diag(1/t) [X_c S + ((X_c Y_c^T) o L) Z_c],   S <- S + Y_c^T Z_c
   An item is a head of a batch row. A sweep (li_sweep) takes an item's chunks (li_causal_chunk) in turn. Each chunk has
   three steps: its own sum, a scan that moves the state past it, and its output. A form of attention has a sum and an
   output function for each of its sweeps. The state is double: forward it is the running mean M = S / t, in reverse the
   sum R. All else is float. A chunk's outputs depend only on its rows and the state before it, and states are summed in
   chunk order, so the bits do not depend on threads. In order: references, inner loops, sweeps, the parts of a chunk,
   and the forms (the product, causal Luna, the memory that forgets). Guarded by tests/kernels/causal.c and
   tests/models/forgetting.c.
   ---------------- */
#ifndef LI_PASS
/* These return the offset of an item's row in x and y, and in z and out. */
LI_INLINE int64_t li_causal_xy(const li_causal *c, int64_t item, int64_t row) {
  return item / c->heads * c->xy_batch + item % c->heads * c->xy_head + row * c->xy_row;
}
LI_INLINE int64_t li_causal_z(const li_causal *c, int64_t item, int64_t row) {
  return item / c->heads * c->z_batch + item % c->heads * c->z_head + row * c->z_row;
}

/* With a horizon T, the mean over rows 1 to t is an exponential one from row T on: M += (y z - M) / min(t, T). Rows are
   counted from 1. */
LI_INLINE int64_t li_within(int64_t t, int64_t horizon) {
  if (horizon > 0 && t > horizon) return horizon;
  return t;
}
LI_INLINE int64_t li_beyond(int64_t t, int64_t horizon) { return t - li_within(t, horizon); }
/* Returns (1 - 1/T)^n. */
LI_HOT double li_horizon_fade(int64_t horizon, int64_t n) {
  double power = horizon > 0 ? 1 - 1 / (double)horizon : 1, y = 1;
  for (; n > 0; n /= 2, power *= power) {
    if (n % 2) y *= power;
  }
  return y;
}

/* The reference computes eq. 7 with the products in another order: out_t = (1/t) sum_{j<=t} (x_t . y_j) z_j. It takes
   n^2 products; li_sweep and li_luna_step are linear in n. Columns of z go in blocks of 64, with sums in double. */
LI_FN void li_causal_reference(const li_causal *c) {
  for (int64_t item = 0; item < c->batch * c->heads; item++) {
    const int64_t xy = li_causal_xy(c, item, 0), z = li_causal_z(c, item, 0);
    for (int64_t t = 0; t < c->rows; t++)
      for (int64_t first = 0; first < c->value_dim; first += 64) {
        const int64_t n = li_min(64, c->value_dim - first);
        double sum[64] = {0};
        for (int64_t j = 0; j <= t; j++) {
          const double score = li_inner(c->dim, c->x + xy + t * c->xy_row, 1, c->y + xy + j * c->xy_row, 1);
          const double fade = li_horizon_fade(c->horizon, li_beyond(t + 1, c->horizon) - li_beyond(j + 1, c->horizon));
          for (int64_t e = 0; e < n; e++) sum[e] += fade * score * (double)c->z[z + j * c->z_row + first + e];
        }
        for (int64_t e = 0; e < n; e++)
          c->out[z + t * c->z_row + first + e] = (float)(sum[e] / (double)li_within(t + 1, c->horizon));
      }
  }
}

/* The reference's step: M += (y^T z - M) / t, result = factor x M. */
LI_HOT void li_mean_step(li_mean m, const float *y, const float *z, const float *x, double factor, float *result) {
  for (int64_t j = 0; j < m.columns; j++) {
    double sum = 0;
    for (int64_t i = 0; i < m.rows; i++) {
      double *at = m.at + i * m.row + j;
      *at += ((double)y[i] * (double)z[j] - *at) / m.t;
      sum += (double)x[i] * *at;
    }
    result[j] = (float)(factor * sum);
  }
}
LI_INLINE li_mean li_mean_of(double *at, int64_t rows, int64_t columns, int64_t row, int64_t t) {
  const li_mean m = { at, rows, columns, row, (double)t };
  return m;
}
/* These return an item's row t in causal Luna's tensors, and an item's number of real slots. */
LI_INLINE int64_t li_luna_row(const li_causal_luna *a, int64_t item, int64_t t) {
  return (item / a->heads * a->rows + t) * a->heads + item % a->heads;
}
LI_INLINE int64_t li_luna_slots(const li_causal_luna *a, int64_t item) {
  return li_real_slots(a->lengths, item / a->heads, a->slots);
}
/* Returns the floats of a slot's state in a sweep: A^T k, A^T v and, with forget, z and the fade of a chunk. */
LI_INLINE int64_t li_luna_unit(const li_causal_luna *a) { return 2 * a->head_dim + (a->forget ? 2 : 0); }
LI_INLINE bool li_luna_carries(const li_causal_luna *a) { return a->own && a->own->positions; }
/* This is an item's part of `state`, or of `one`, which holds one item: the means of k^T A [head_dim, slots] and A^T v
   [slots, head_dim] over the tokens so far and, with forget, their weights [slots]. */
typedef struct li_luna_state { double *ka, *av, *weights; } li_luna_state;
LI_HOT li_luna_state li_luna_state_of(const li_causal_luna *a, int64_t item, double *one) {
  const int64_t items = a->state ? a->batch * a->heads : 1, size = a->head_dim * a->slots;
  double *at = a->state ? a->state : one;
  if (!a->state) item = 0;
  const li_luna_state s = { at + item * size, at + (items + item) * size, at + 2 * items * size + item * a->slots };
  return s;
}

/* A slot of the routed memory may weigh nothing. */
LI_INLINE double li_quotient(double x, double y) {
  if (y == 0) return 0;
  return x / y;
}
/* Returns e^x for x in [-80, 0]: the series of e^(x/512), to the power of 512. */
LI_HOT double li_decay(double x) {
  const double r = x / 512;
  double y = 1;
  for (int i = 8; i > 0; i--) y = 1 + y * r / i;
  for (int i = 0; i < 9; i++) y *= y;
  return y;
}

/* A row that is not finite would stay in a stream's means for ever. That row and all later ones (`skipping`) have no
   result and do not enter the means. */
LI_HOT bool li_luna_skips(const li_causal_luna *a, int64_t item, int64_t t, bool skipping) {
  const int64_t d = a->head_dim, l = li_luna_slots(a, item), row = li_luna_row(a, item, t);
  const int64_t wide = row * d, narrow = row * a->slots;
  if (!a->state || li_luna_carries(a)) return false;
  if (!skipping && li_are_finite(d, a->k + wide) && li_are_finite(d, a->v + wide) &&
      li_are_finite(l, a->s + narrow) &&
      (!a->forget || a->routed || li_are_finite(l, a->forget + narrow))) return false;

  for (int64_t i = 0; i < d; i++) a->out[wide + i] = (float)NAN;
  return true;
}

/* These return a forget gate from its logit, and a weight from its score. */
LI_FN double li_gate_reference(float x) {
  float log = -li_activation_scalar(LUNA_ACTIVATION_SOFTPLUS, -x) / 16;
  if (log < -1) log = -1;
  return li_decay((double)log);
}
LI_FN double li_weight_reference(float s) {
  const float limit = LUNA_FORGET_SCORE;
  if (s < -limit) s = -limit;
  if (s > limit) s = limit;
  return (double)li_exp1_scalar(s);
}

/* Returns how fast the slots of an item's head fade in the routed memory, and -1 in others. */
LI_HOT float li_luna_fade(const li_causal_luna *a, int64_t item) {
  if (!a->routed) return -1;
  return li_activation_scalar(LUNA_ACTIVATION_SIGMOID, a->forget[item % a->heads]) / 4;
}
/* Returns the routed memory's gate, where a token writes s. */
LI_FN double li_route_reference(float s, float fade) {
  double kept = 1 - (double)s;
  if (kept < 0.36787944117144233) kept = 0.36787944117144233; /* e^-1 */
  return kept * li_decay(-(double)fade);
}
/* Returns what the routed memory adds to a slot's score. */
LI_FN float li_route_log_reference(double weight) {
  const double x = log(weight);
  return x < (double)LUNA_ROUTE_EMPTY ? -1e30f : (float)x;
}

/* Computes u = scale K q, w = softmax(u), out = w V. Row i of K and V is slot i's mean of k and v over the tokens so
   far, weighted by A = e^s times the gates since: with gates of 1, the pack's softmax made causal. In the routed memory
   A is s, u gets the log of the slot's weight, and w is 0 in empty slots. */
LI_FN void li_forget_reference(const li_causal_luna *a, double *means) {
  const int64_t d = a->head_dim, l = a->slots, state = d * l;
  float *w = (float *)(void *)(means + 2 * state + l);
  for (int64_t item = 0; item < a->batch * a->heads; item++) {
    const int64_t real = li_luna_slots(a, item);
    const li_luna_state m = li_luna_state_of(a, item, means);
    double *k = m.ka, *v = m.av, *weight = m.weights;
    bool skips = false;
    if (a->position == 0) {
      for (int64_t i = 0; i < l; i++) weight[i] = 0;
      for (int64_t i = 0; i < state; i++) k[i] = v[i] = 0; /* The first share may be NaN and reads these. */
    }

    for (int64_t t = 0; t < a->rows; t++) {
      const int64_t row = li_luna_row(a, item, t), wide = row * d, narrow = row * l;
      if ((skips = li_luna_skips(a, item, t, skips))) continue;
      for (int64_t i = 0; i < real; i++) {
        double u = 0, new_weight = (double)a->s[narrow + i];
        if (a->routed) weight[i] *= li_route_reference(a->s[narrow + i], li_luna_fade(a, item));
        else {
          weight[i] *= li_gate_reference(a->forget[narrow + i]);
          new_weight = li_weight_reference(a->s[narrow + i]);
        }
        new_weight *= LUNA_FORGET_SCALE;
        weight[i] += new_weight;
        const double share = li_quotient(new_weight, weight[i]);
        for (int64_t j = 0; j < d; j++) {
          double *kj = k + j * l + i, *vj = v + i * d + j;
          if (share == 1) *kj = *vj = 0; /* They may be NaN. */
          *kj += share * ((double)a->k[wide + j] - *kj);
          *vj += share * ((double)a->v[wide + j] - *vj);
          u += (double)a->q[wide + j] * *kj;
        }
        w[i] = (float)(u * (double)a->scale);
        if (a->routed) w[i] += li_route_log_reference(weight[i]);
      }

      li_softmax_reference(1, real, w, w);
      for (int64_t i = 0; i < real && a->routed; i++)
        if (li_route_log_reference(weight[i]) == -1e30f) w[i] = 0;
      if (LI_DROPS(a)) li_dropout_reference(&a->own->dropout, narrow, real, w, w, false);
      for (int64_t j = 0; j < d; j++) {
        double sum = 0;
        for (int64_t i = 0; i < real; i++) sum += (double)w[i] * v[i * d + j];
        a->out[wide + j] = (float)sum;
      }
    }
  }
}

/* Computes u = scale q_t mean(k^T A), w = softmax(u), out_t = w_t mean(A^T v) over the tokens so far, with A = omega(s)
   [section 3.3]. */
LI_FN void li_causal_luna_reference(const li_causal_luna *a, void *scratch) {
  const int64_t d = a->head_dim, state = d * a->slots;
  double *means = (double *)scratch;
  if (a->forget) {
    li_forget_reference(a, means);
    return;
  }
  float *omega = (float *)(void *)(means + 2 * state), *w = omega + a->slots;
  for (int64_t item = 0; item < a->batch * a->heads; item++) {
    const int64_t real = li_luna_slots(a, item);
    const li_luna_state m = li_luna_state_of(a, item, means);
    bool skips = false;
    if (a->position == 0)
      for (int64_t l = 0; l < state; l++) m.ka[l] = m.av[l] = 0;

    for (int64_t t = 0; t < a->rows; t++) {
      const int64_t row = li_luna_row(a, item, t), wide = row * d, narrow = row * a->slots;
      const int64_t now = li_within(a->position + t + 1, a->horizon);
      if ((skips = li_luna_skips(a, item, t, skips))) continue;
      li_activate_reference((int)a->omega, real, a->s + narrow, omega);
      li_mean_step(li_mean_of(m.ka, d, real, a->slots, now), a->k + wide, omega, a->q + wide, (double)a->scale, w);
      li_softmax_reference(1, real, w, w);
      li_mean_step(li_mean_of(m.av, real, d, d, now), omega, a->v + wide, w, 1, a->out + wide);
      if (a->kept)
        for (int64_t l = 0; l < a->slots; l++) a->kept[narrow + l] = l < real ? w[l] : 0;
    }
  }
}
/* Returns whether the call is a stream's single row. */
LI_INLINE bool li_luna_steps(const li_causal_luna *a) { return a->state && a->rows == 1 && !li_luna_carries(a); }
LI_FN size_t li_causal_luna_scratch_reference(const li_causal_luna *a) {
  return li_round((size_t)((2 * a->head_dim + 1) * a->slots) * sizeof(double)) + (size_t)li_floats(2 * a->slots);
}
#endif

#ifdef LI_PASS_LOOPS

/* Puts the state before the chunk in place of the chunk's sum, and adds the sum to the carried state. Strips of
   constant length and one operation per loop let compilers vectorise this at -O2. */
#undef LI_STRIP
#define LI_STRIP 64
LI_INLINE void LI_K(scan_strip)(int64_t n, double joins, double leaves, float *state, double *carried) {
  double sum[LI_STRIP];
  for (int64_t i = 0; i < n; i++) sum[i] = (double)state[i];
  for (int64_t i = 0; i < n; i++) state[i] = (float)carried[i];
  for (int64_t i = 0; i < n; i++) carried[i] += joins * sum[i] - leaves * carried[i];
}
LI_FN void LI_K(scan)(int64_t n, double joins, double leaves, float *state, double *carried) {
  int64_t i;
  for (i = 0; i + LI_STRIP <= n; i += LI_STRIP)
    LI_K(scan_strip)(LI_STRIP, joins, leaves, state + i, carried + i);
  if (i < n) LI_K(scan_strip)(n - i, joins, leaves, state + i, carried + i);
}

LI_FN bool LI_K(all_finite)(li_matrix x) {
  const vf zero = vf_zero();
  const float *at = x.at;
  const int64_t n = x.columns;
  vf sum0 = zero, sum1 = zero, sum2 = zero, sum3 = zero; /* 0 for finite x */
  int64_t i;
  for (int64_t t = 0; t < x.rows; t++, at += x.row) {
    for (i = 0; i + 4 * VF <= n; i += 4 * VF) {
      sum0 = vf_fma(vf_load(at + i), zero, sum0);
      sum1 = vf_fma(vf_load(at + i + VF), zero, sum1);
      sum2 = vf_fma(vf_load(at + i + 2 * VF), zero, sum2);
      sum3 = vf_fma(vf_load(at + i + 3 * VF), zero, sum3);
    }
    for (; i < n; i += VF) sum0 = vf_fma(LI_K(get)(at + i, n - i), zero, sum0);
  }
  return vf_sum(vf_add(vf_add(sum0, sum1), vf_add(sum2, sum3))) == 0;
}

LI_FN void LI_K(copy_rows)(li_matrix x, float *y, int64_t y_row) {
  for (int64_t t = 0; t < x.rows; t++, x.at += x.row, y += y_row)
    for (int64_t i = 0; i < x.columns; i += VF)
      LI_K(put)(y + i, LI_K(get)(x.at + i, x.columns - i), x.columns - i);
}

/* Computes y = diag(factors) x + 0. Adding 0 turns -0 into 0. */
LI_FN void LI_K(scale_rows)(li_matrix x, const float *factors, float *y, int64_t y_row) {
  const int64_t n = x.columns;
  for (int64_t t = 0; t < x.rows; t++, x.at += x.row, y += y_row) {
    const vf factor = vf_set(factors[t]);
    for (int64_t i = 0; i < n; i += VF)
      LI_K(put)(y + i, vf_add(vf_mul(LI_K(get)(x.at + i, n - i), factor), vf_zero()), n - i);
  }
}

/* Computes eq. 7 for one row of a stream, M <- M + (y^T z - M) / t, result = x M, in columns [first, first + n), where
   n is 8 or 1. The memory that forgets has M <- M + share (new - M). Its keys [head_dim, slots] have new = y and a
   share for each column, its values [slots, head_dim] have new = z and a share for each row. */
LI_INLINE void LI_K(step_block)(int64_t n, li_mean_kind kind, const li_mean *m, int64_t first, const double *share,
                                const float *y, const float *z, const float *x, double *result) {
  const double part = 1 / m->t;
  double wide[8], sum[8], *mean = m->at + first;
  for (int64_t j = 0; j < n; j++) sum[j] = 0;
  for (int64_t j = 0; j < n; j++) wide[j] = kind == LI_STEP_KEYS ? share[first + j] : (double)z[first + j];
  for (int64_t i = 0; i < m->rows; i++, mean += m->row) {
    const double row = kind == LI_STEP_VALUES ? share[i] : (double)y[i], xi = (double)x[i];
    for (int64_t j = 0; j < n; j++) {
      if (kind == LI_STEP_MEAN) mean[j] += (row * wide[j] - mean[j]) * part;
      else if (kind == LI_STEP_KEYS) mean[j] += wide[j] * (row - mean[j]);
      else mean[j] += row * (wide[j] - mean[j]);
    }
    for (int64_t j = 0; j < n; j++) sum[j] += xi * mean[j];
  }
  for (int64_t j = 0; j < n; j++) result[first + j] = sum[j];
}
LI_INLINE void LI_K(step_columns)(li_mean_kind kind, const li_mean *m, const double *share, const float *y,
                                  const float *z, const float *x, double *result) {
  int64_t j = 0;
  for (; j + 8 <= m->columns; j += 8) LI_K(step_block)(8, kind, m, j, share, y, z, x, result);
  for (; j < m->columns; j++) LI_K(step_block)(1, kind, m, j, share, y, z, x, result);
}
LI_FN void LI_K(step_mean)(li_mean_kind kind, li_mean m, const double *share, const float *y,
                           const float *z, const float *x, double *result) {
  if (kind == LI_STEP_MEAN) LI_K(step_columns)(LI_STEP_MEAN, &m, share, y, z, x, result);
  else if (kind == LI_STEP_KEYS) LI_K(step_columns)(LI_STEP_KEYS, &m, share, y, z, x, result);
  else LI_K(step_columns)(LI_STEP_VALUES, &m, share, y, z, x, result);
}

/* ---- The memory that forgets: [rows, slots] each; rows of s and gates may be apart ---- */

/* Adds x to sum + rest, which is more exact than a float. */
LI_INLINE void LI_K(add_exact)(vf *sum, vf *rest, vf x) {
  const vf total = vf_add(*sum, x), part = vf_sub(total, *sum);
  *rest = vf_add(*rest, vf_add(vf_sub(*sum, vf_sub(total, part)), vf_sub(x, part)));
  *sum = total;
}
/* Returns ln(sigmoid(x)) / 16. The log of a forget gate is this value, but at least -1. */
LI_INLINE vf LI_K(gate_log)(vf x) {
  const vf rest = vf_log1p(vf_exp(vf_neg(vf_abs(x))));
  return vf_mul(vf_sub(vf_min(vf_zero(), x), rest), vf_of(1.0 / 16));
}

/* Returns the log of the routed memory's gate, where a token writes x. */
LI_INLINE vf LI_K(route_log)(vf x, float fade) {
  return vf_sub(vf_max(vf_of(-1), vf_log1p(vf_neg(x))), vf_set(fade));
}

/* Computes W_t = e^{s_t - c_t} LUNA_FORGET_SCALE, where c_t is the sum of the gates' logs up to t. `sums` gets the last
   row's c as the sum of two floats, then the sum of W. With a fade that is not negative, the memory is routed: the
   weight is s_t itself, and there are no gates. */
LI_FN void LI_K(forget_weights)(li_matrix s, li_matrix gates, float fade, float *w, float *sums) {
  const int64_t n = s.columns;
  const bool routed = !(fade < 0);
  for (int64_t i = 0; i < n; i += VF) {
    vf c = vf_zero(), c_rest = vf_zero(), total = vf_zero(), total_rest = vf_zero();
    for (int64_t t = 0; t < s.rows; t++) {
      vf own = LI_GET(s.at + t * s.row);
      if (routed) LI_K(add_exact)(&c, &c_rest, LI_K(route_log)(own, fade));
      else {
        LI_K(add_exact)(&c, &c_rest, vf_max(vf_of(-1), LI_K(gate_log)(LI_GET(gates.at + t * gates.row))));
        own = vf_exp(vf_min(vf_of(LUNA_FORGET_SCORE), vf_max(vf_of(-LUNA_FORGET_SCORE), own)));
      }
      const vf since = vf_mul(vf_exp(vf_neg(c)), vf_mul(vf_sub(vf_of(1), c_rest), vf_of(LUNA_FORGET_SCALE)));
      const vf weight = vf_mul(own, since);
      LI_K(add_exact)(&total, &total_rest, weight);
      LI_PUT(w + t * n, weight);
    }
    LI_PUT(sums, c);
    LI_PUT(sums + n, c_rest);
    LI_PUT(sums + 2 * n, vf_add(total, total_rest));
  }
}
/* Computes Z_t = before + the sum of W up to t. */
LI_FN void LI_K(forget_totals)(li_matrix w, const float *before, float *z) {
  const int64_t n = w.columns;
  for (int64_t i = 0; i < n; i += VF) {
    vf sum = LI_GET(before), rest = vf_zero();
    for (int64_t t = 0; t < w.rows; t++) {
      LI_K(add_exact)(&sum, &rest, LI_GET(w.at + t * n));
      LI_PUT(z + t * n, vf_add(sum, rest));
    }
  }
}
/* Computes what the routed memory adds to a slot's score, logs = c + ln Z. An empty slot gets -1e30, and a Z so large
   that what is divided by it is 0. */
LI_FN void LI_K(route_logs)(li_matrix s, float fade, float *z, float *logs) {
  const int64_t n = s.columns;
  for (int64_t i = 0; i < n; i += VF) {
    vf c = vf_zero(), c_rest = vf_zero();
    for (int64_t t = 0; t < s.rows; t++) {
      const vf weight = LI_GET(z + t * n);
      LI_K(add_exact)(&c, &c_rest, LI_K(route_log)(LI_GET(s.at + t * s.row), fade));

      const vf log = vf_add(vf_log(vf_select(vf_lt(vf_of(1e37f), weight), vf_zero(), weight)), vf_add(c, c_rest));
      const vm empty = vf_lt(log, vf_of(LUNA_ROUTE_EMPTY));
      LI_PUT(logs + t * n, vf_select(empty, vf_of(-1e30f), log));
      LI_PUT(z + t * n, vf_select(empty, vf_of(1e38f), weight));
    }
  }
}
LI_FN void LI_K(forget_divide)(int64_t n, float factor, const float *x, const float *z, float *y) {
  for (int64_t i = 0; i < n; i += VF) LI_PUT(y, vf_div(vf_mul(vf_set(factor), LI_GET(x)), LI_GET(z)));
}
/* Computes H = scale / Z dU, from dU in h, and dZ = -(R dR + (U - own) dU) / Z, where `own` is 1 if the score has
   ln Z in it, else 0. */
LI_FN void LI_K(forget_slopes)(int64_t n, float scale, float own, const float *u, const float *z, const float *r,
                               const float *dr, float *h, float *dz) {
  for (int64_t i = 0; i < n; i += VF) {
    const vf du = LI_GET(h), sum = vf_fma(LI_GET(r), LI_GET(dr), vf_mul(vf_sub(LI_GET(u), vf_set(own)), du));
    LI_PUT(dz, vf_neg(vf_div(sum, LI_GET(z))));
    LI_PUT(h, vf_div(vf_mul(vf_set(scale), du), LI_GET(z)));
  }
}
/* Replaces H by X = W (dW + after + the sum of dZ from t on). Adds X to ds, unless null, where the score is within its
   bounds. ds has s's rows. In the routed memory, which has z, s is a share of W and gets X / s where it is not 0, and H
   is replaced by X - dU. */
LI_FN void LI_K(forget_scores)(li_matrix s, const float *w, const float *dz, const float *after, const float *z,
                               float scale, float *dw, float *ds, float *h) {
  const int64_t n = s.columns;
  for (int64_t i = 0; i < n; i += VF) {
    vf sum = LI_GET(after), rest = vf_zero();
    for (int64_t t = s.rows - 1; t >= 0; t--) {
      LI_K(add_exact)(&sum, &rest, LI_GET(dz + t * n));
      const vf x = vf_mul(LI_GET(w + t * n), vf_add(LI_GET(dw + t * n), vf_add(sum, rest)));
      vf left = x, slope = x;
      vm moves = vf_le(vf_abs(LI_GET(s.at + t * s.row)), vf_of(LUNA_FORGET_SCORE));
      if (z) {
        const vf own = LI_GET(s.at + t * s.row);
        left = vf_sub(x, vf_div(vf_mul(LI_GET(h + t * n), LI_GET(z + t * n)), vf_set(scale)));
        moves = vf_lt(vf_zero(), own);
        slope = vf_div(x, own);
      }
      LI_PUT(h + t * n, left);
      if (ds) LI_PUT(ds + t * s.row, vf_add(LI_GET(ds + t * s.row), vf_select(moves, slope, vf_zero())));
    }
  }
}
/* The gradient of a gate's log is minus the sum of W dW (in dw) from its row on. `after` [2, slots] holds the sum over
   later rows as the sum of two floats, and these rows are added to it. In the routed memory a gate is 1 - x, x gets a
   gradient where it is not 0, and two more rows of `after` hold the sum of these sums, the gradient of the fade. */
LI_FN void LI_K(forget_gates)(li_matrix gates, bool routed, const float *dw, float *after, float *dgates) {
  const int64_t n = gates.columns;
  for (int64_t i = 0; i < n; i += VF) {
    vf sum = LI_GET(after), rest = LI_GET(after + n), all = LI_GET(after + 2 * n), all_rest = LI_GET(after + 3 * n);
    for (int64_t t = gates.rows - 1; t >= 0; t--) {
      const vf x = LI_GET(gates.at + t * gates.row);
      LI_K(add_exact)(&sum, &rest, LI_GET(dw + t * n));
      vf slope = vf_div(vf_of(-1.0 / 16), vf_add(vf_of(1), vf_exp(x)));
      vm moves = vf_lt(vf_of(-1), LI_K(gate_log)(x));
      if (routed) {
        LI_K(add_exact)(&all, &all_rest, vf_add(sum, rest));
        slope = vf_div(vf_of(1), vf_sub(vf_of(1), x));
        moves = vf_lt(vf_zero(), x);
      }
      const vf dx = vf_select(moves, vf_mul(slope, vf_add(sum, rest)), vf_zero());
      if (dgates) LI_PUT(dgates + t * gates.row, vf_add(LI_GET(dgates + t * gates.row), dx));
    }

    LI_PUT(after, sum);
    LI_PUT(after + n, rest);
    LI_PUT(after + 2 * n, all);
    LI_PUT(after + 3 * n, all_rest);
  }
}

#elif !defined(LI_PASS)

typedef struct li_causal_chunk {
  const li_kernels *kernels;
  const li_causal *product; /* The other is null. */
  const li_causal_luna *luna;
  int64_t item, first, rows;
  int64_t slots;            /* Real ones */
  double before;            /* The mean before the first row is over this many tokens. */
  int64_t within;           /* This many rows are within the horizon. Later rows fade the means. */
  double fade;              /* 1 - 1 / horizon */
  bool reverse;
  bool begins, last;        /* If begins, the state before is empty. If last, nothing reads the state after. */
  /* `sum` writes the chunk's own sum to state, and may write to kept. `output` reads kept, and the state before the
     chunk. */
  float *state, *kept;
  float *scores, *panels, *buffer[3]; /* scores [rows, LI_CHUNK], buffers [LI_CHUNK, max(dim, value_dim)] */
  float *h;                 /* Rows of H (backward) */
  /* The memory that forgets has the forward state before the chunk here (backward only), and the sums of
     forget_weights, which are part of kept. */
  float *sums, *logs;
} li_causal_chunk;
typedef void (*li_chunk_step)(const li_causal_chunk *c);
typedef struct li_sweep {
  const li_kernels *kernels;
  const li_causal *product;  /* The other is null. */
  const li_causal_luna *luna;
  li_chunk_step sum, output, now; /* Steps before and after the scan; the one that runs now */
  bool reverse;              /* The sweep goes from the last chunk to the first; the state is a sum, not a mean. */
  bool forgets;              /* States are sums, which fade by each chunk's gates. */
  bool continues, reads;     /* The sweep starts from the caller's state, and stores it unless `reads`. */
  int64_t items, heads, rows, dim, value_dim, horizon;
  int64_t slots, unit, kept; /* A state has unit * slots floats. A chunk keeps `kept`. */
  float *h;                  /* [items, rows, slots], or null */
  float *sums;               /* [items, chunks, slots, unit] */
  /* Threads share `window` chunks of every item between two barriers. If window is 1, each thread sweeps whole
     items. */
  int64_t chunks, window, start;
  int64_t parts;             /* Threads share out each state in this many parts for a window's scan. */
  int64_t thread_bytes, state_bytes, record_bytes;
  char *threads_at, *state_at, *record_at;
} li_sweep;

/* Returns the threads, or null if there is too little work to wake them. */
LI_INLINE const li_parallel *li_worth(const li_parallel *parallel, int64_t products) {
  if (products >= (int64_t)1 << 18) return parallel;
  return NULL;
}

/* Returns the floats of the panels for any product among a chunk's rows, dim and value_dim. */
LI_HOT int64_t li_chunk_panels(const li_kernels *kernels, int64_t dim, int64_t value_dim) {
  const int64_t size[3] = {LI_CHUNK, dim, value_dim};
  int64_t max = li_panels_size(kernels, LI_CHUNK, LI_CHUNK);
  for (int i = 0; i < 3; i++)
    for (int j = 0; j < 3; j++)
      if (i != j) max = li_max(max, li_panels_size(kernels, size[i], size[j]));
  return max;
}

/* Lays the sweep out in `memory`, unless that is null, and returns its bytes. A record is a chunk's state and kept. */
LI_FN size_t li_sweep_plan(li_sweep *s, int64_t threads, void *memory) {
  const int64_t wide = li_max(s->dim, s->value_dim), state = s->unit * s->slots;
  s->chunks = li_divide_up(s->rows, LI_CHUNK);
  s->window = 1;
  s->parts = threads;
  /* Whole items would not keep the threads busy. */
  if (s->chunks > 1 && s->items > 0 && threads > 1 && s->items % threads != 0 && s->items < 8 * threads)
    s->window = li_min(s->chunks, li_divide_up(16 * threads, s->items));
  int64_t states = threads, records = threads;
  if (s->window > 1) {
    states = s->items;
    records = s->items * s->window;
  }
  s->thread_bytes = li_floats(LI_CHUNK * LI_CHUNK) + li_floats(li_chunk_panels(s->kernels, s->dim, s->value_dim)) +
                  3 * li_floats(LI_CHUNK * wide);
  s->state_bytes = (int64_t)li_round((size_t)state * sizeof(double));
  s->record_bytes = li_floats(state) + li_floats(s->kept);
  if (memory) {
    s->threads_at = (char *)memory;
    s->state_at = s->threads_at + threads * s->thread_bytes;
    s->record_at = s->state_at + states * s->state_bytes;
  }
  return (size_t)(threads * s->thread_bytes + states * s->state_bytes + records * s->record_bytes);
}

LI_HOT int64_t li_sweep_slots(const li_sweep *s, int64_t item) {
  if (s->luna) return li_luna_slots(s->luna, item);
  return s->slots;
}
LI_INLINE int64_t li_sweep_state(const li_sweep *s, int64_t item) { return s->unit * li_sweep_slots(s, item); }
LI_INLINE double *li_sweep_carried(const li_sweep *s, int64_t place) {
  return (double *)(void *)(s->state_at + place * s->state_bytes);
}
LI_HOT int64_t li_sweep_position(const li_sweep *s, int64_t item) {
  if (!s->luna) return 0;
  if (li_luna_carries(s->luna)) return s->luna->own->positions[item / s->heads];
  return s->luna->position;
}

/* Returns an item's k-th chunk in the sweep's order, with the record at `place` and the buffers of `thread`. */
LI_FN li_causal_chunk li_sweep_chunk(const li_sweep *s, int64_t item, int64_t k, int64_t place, int64_t thread) {
  const int64_t wide = LI_CHUNK * li_max(s->dim, s->value_dim), position = li_sweep_position(s, item);
  char *record = s->record_at + place * s->record_bytes, *buffer = s->threads_at + thread * s->thread_bytes;
  li_causal_chunk c;
  c.kernels = s->kernels;
  c.product = s->product;
  c.luna = s->luna;
  c.item = item;
  c.slots = li_sweep_slots(s, item);
  c.first = (s->reverse ? s->chunks - 1 - k : k) * LI_CHUNK;
  c.rows = li_min(LI_CHUNK, s->rows - c.first);
  c.before = (double)li_within(position + c.first, s->horizon);
  c.within = c.rows + li_beyond(position + c.first, s->horizon) - li_beyond(position + c.first + c.rows, s->horizon);
  c.fade = li_horizon_fade(s->horizon, 1);
  c.reverse = s->reverse;
  c.begins = k == 0 && (s->reverse || position == 0);
  c.last = k == s->chunks - 1 && !s->continues;

  c.state = li_take(&record, s->unit * s->slots);
  c.kept = li_take(&record, s->kept);
  c.scores = li_take(&buffer, LI_CHUNK * LI_CHUNK);
  c.panels = li_take(&buffer, li_chunk_panels(s->kernels, s->dim, s->value_dim));
  for (int i = 0; i < 3; i++) c.buffer[i] = li_take(&buffer, wide);
  c.h = li_offset(s->h, (item * s->rows + c.first) * s->slots);
  c.sums = li_offset(s->sums, (item * s->chunks + c.first / LI_CHUNK) * s->slots * s->unit);
  c.logs = s->forgets ? c.kept + LI_CHUNK * s->slots : NULL;
  return c;
}

/* Returns (1 - 1/T)^n, where n rows of [first, end) are beyond the horizon T. */
LI_HOT double li_chunk_faded(const li_causal_chunk *c, int64_t first, int64_t end) {
  double y = 1;
  for (int64_t t = li_max(first, c->within); t < end; t++) y *= c->fade;
  return y;
}
/* Returns the fraction of a slot's state that is left after the chunk. */
LI_HOT double li_chunk_fade(const li_causal_chunk *c, int64_t slot) {
  return li_decay((double)c->logs[slot] + (double)c->logs[c->slots + slot]);
}

/* Moves elements [first, end) of the carried state past a chunk. c->state holds the chunk's own sum S_c and gets the
   state before the chunk. The mean is over b tokens before the chunk and t tokens after it:
     mean M         M <- (left b M + S_c) / t, where left = (1 - 1/T)^n and n rows are beyond the horizon T
     sum R          R <- left R + S_c, in reverse
     with forget    S <- fade (S + S_c), or R <- fade R + S_c in reverse, with a fade for each slot
   The scan computes M += joins S_c - leaves M. With no row beyond the horizon, 1 - b / t is rows / t, which is
   exact. */
LI_HOT void li_sweep_scan(const li_sweep *s, const li_causal_chunk *c, double *carried, int64_t first, int64_t end) {
  const double t = c->before + (double)c->within, left = li_chunk_faded(c, 0, c->rows);
  double joins = 1, leaves = 1 - left;

  if (c->last) {
    for (int64_t i = first; i < end; i++) c->state[i] = (float)carried[i];
  } else if (s->forgets) {
    for (int64_t from = first, to; from < end; from = to) {
      const double fade = li_chunk_fade(c, from / s->unit);
      to = li_min(end, (from / s->unit + 1) * s->unit);
      s->kernels->scan(to - from, s->reverse ? 1 : fade, 1 - fade, c->state + from, carried + from);
    }
  } else if (first < end) {
    if (!s->reverse) {
      joins = 1 / t;
      leaves = left < 1 ? 1 - left * (c->before / t) : (double)c->rows / t;
    }
    s->kernels->scan(end - first, joins, leaves, c->state + first, carried + first);
  }
}

/* Loads or stores the caller's state of an item. In the sweep a slot's parts are side by side and, with forget, are
   sums instead of means. */
LI_FN void li_luna_exchange(const li_causal_luna *a, int64_t item, double *state, bool store) {
  const int64_t d = a->head_dim;
  const ptrdiff_t before = !store && a->own ? a->own->before : 0;
  const li_luna_state m = li_luna_state_of(a, item, NULL);
  for (int64_t slot = 0; slot < li_luna_slots(a, item); slot++, state += li_luna_unit(a)) {
    double *k = m.ka + before + slot, *v = m.av + before + slot * d, weight = 1;
    if (a->forget && store) m.weights[slot] = state[2 * d];
    if (a->forget) weight = m.weights[before + slot];
    for (int64_t i = 0; i < d; i++) {
      if (store) k[i * a->slots] = li_quotient(state[i], weight);
      else state[i] = k[i * a->slots] * weight;
      if (store) v[i] = li_quotient(state[d + i], weight);
      else state[d + i] = v[i] * weight;
    }
    if (!a->forget) continue;
    state[2 * d] = weight;
    state[2 * d + 1] = 0;
  }
}
LI_HOT void li_sweep_start(const li_sweep *s, int64_t item, double *carried) {
  if (s->continues && li_sweep_position(s, item) > 0) li_luna_exchange(s->luna, item, carried, false);
  else memset(carried, 0, (size_t)li_sweep_state(s, item) * sizeof(double));
}
/* Stores a new state. A stream's replaces the old one, so it must be finite. Training keeps the old one elsewhere. */
LI_FN void li_sweep_end(const li_sweep *s, int64_t item, double *carried) {
  if (!s->continues || s->reads) return;
  const bool replaces = !li_luna_carries(s->luna);
  for (int64_t i = 0; replaces && i < li_sweep_state(s, item); i++)
    if (carried[i] - carried[i] != 0) return;
  li_luna_exchange(s->luna, item, carried, true);
}

LI_FN void li_sweep_items(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_sweep *s = (const li_sweep *)work;
  double *carried = li_sweep_carried(s, thread);
  for (int64_t item = first; item < last; item++) {
    li_sweep_start(s, item, carried);
    for (int64_t k = 0; k < s->chunks; k++) {
      const li_causal_chunk c = li_sweep_chunk(s, item, k, thread, thread);
      s->sum(&c);
      li_sweep_scan(s, &c, carried, 0, li_sweep_state(s, item));
      s->output(&c);
    }
    li_sweep_end(s, item, carried);
  }
}

/* The threads share a window of chunks: first the sums, then the scan, where each thread has some elements of every
   state, then the outputs. */
LI_FN void li_sweep_window(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_sweep *s = (const li_sweep *)work;
  const int64_t window = li_min(s->window, s->chunks - s->start);
  for (int64_t i = first; i < last; i++) {
    const li_causal_chunk c = li_sweep_chunk(s, i / window, s->start + i % window, i, thread);
    s->now(&c);
  }
}
LI_FN void li_sweep_scans(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_sweep *s = (const li_sweep *)work;
  const int64_t window = li_min(s->window, s->chunks - s->start);
  for (int64_t i = 0; i < s->items * window; i++) {
    const int64_t item = i / window, n = li_sweep_state(s, item);
    const li_causal_chunk c = li_sweep_chunk(s, item, s->start + i % window, i, thread);
    li_sweep_scan(s, &c, li_sweep_carried(s, item), li_share(n, first, s->parts), li_share(n, last, s->parts));
  }
}

LI_FN void li_sweep_run(li_sweep *s, li_chunk_step sum, li_chunk_step output, const li_parallel *parallel,
                        void *scratch) {
  s->sum = sum;
  s->output = output;
  parallel = li_worth(parallel, s->items * s->rows * s->dim * s->value_dim);
  (void)li_sweep_plan(s, li_threads(parallel), scratch);
  if (s->window == 1) {
    li_each(parallel, s->items, li_sweep_items, s);
    return;
  }

  for (int64_t item = 0; item < s->items; item++) li_sweep_start(s, item, li_sweep_carried(s, item));
  for (s->start = 0; s->start < s->chunks; s->start += s->window) {
    const int64_t chunks = s->items * li_min(s->window, s->chunks - s->start);
    s->now = s->sum;
    li_each(parallel, chunks, li_sweep_window, s);
    li_each(parallel, s->parts, li_sweep_scans, s);
    s->now = s->output;
    li_each(parallel, chunks, li_sweep_window, s);
  }
  for (int64_t item = 0; item < s->items; item++) li_sweep_end(s, item, li_sweep_carried(s, item));
}

LI_FN void li_sweep_set(li_sweep *s, const li_kernels *kernels, int64_t batch, int64_t heads, int64_t rows,
                        bool reverse) {
  li_clear(s, sizeof *s);
  s->kernels = kernels;
  s->items = batch * heads;
  s->heads = heads;
  s->rows = rows;
  s->reverse = reverse;
}

/* ---- Parts of a chunk ---- */

/* The triangle is two triangles of half a chunk and the square below them. */
#define LI_HALF (LI_CHUNK / 2)

/* scores = (X Y^T) o L. Each of the two triangles gets 0 above its diagonal. The square above both is neither written
   nor read. */
LI_HOT void li_chunk_scores(const li_causal_chunk *c, li_matrix x, li_matrix y) {
  li_panels b = li_words_of(c->kernels, li_transposed(y), c->panels, NULL);
  for (int64_t first = 0; first < c->rows; first = b.n) {
    float *scores = c->scores + first * LI_CHUNK;
    b.n = li_min(first + LI_HALF, c->rows);
    li_matmul_panels(c->kernels, 1, li_lines(x, first, b.n), b, li_into(scores, LI_CHUNK, false));
    for (int64_t t = first; t < b.n; t++, scores += LI_CHUNK)
      memset(scores + t + 1, 0, li_bytes(b.n - t - 1));
  }
  if (c->within == c->rows) return;
  for (int64_t j = 0; j < c->rows; j++) { /* Each row beyond the horizon leaves less of row j. */
    double left = 1;
    for (int64_t t = li_max(c->within, j + 1); t < c->rows; t++)
      c->scores[t * LI_CHUNK + j] *= (float)(left *= c->fade);
  }
}
/* Returns X with its rows faded, in buffer[2], or X itself if no row is beyond the horizon. */
LI_FN li_matrix li_chunk_rows(const li_causal_chunk *c, bool to_end, li_matrix x) {
  float fades[LI_CHUNK];
  if (c->within == c->rows) return x;
  for (int64_t t = 0; t < c->rows; t++)
    fades[t] = (float)(to_end ? li_chunk_faded(c, t + 1, c->rows) : li_chunk_faded(c, 0, t + 1));
  c->kernels->scale_rows(x, fades, c->buffer[2], x.columns);
  return li_dense(c->buffer[2], x.rows, x.columns);
}
/* Computes factor base / t for each row. */
LI_HOT void li_causal_factors(const li_causal_chunk *c, float factor, double base, float *factors) {
  for (int64_t t = 0; t < c->rows; t++)
    factors[t] = (float)((double)factor * base / (c->before + (double)li_min(t + 1, c->within)));
}

/* out (+)= a X S + b ((X Y^T) o L) Z, where S is the state before the chunk. This is the bracket of eq. 7 and of its
   gradients. */
LI_FN void li_causal_bracket(const li_causal_chunk *c, float a, float b, li_matrix x, li_matrix y, li_matrix state,
                             li_matrix z, li_out out) {
  int64_t last;
  li_chunk_scores(c, x, y);
  if (!c->begins) {
    li_matmul(c->kernels, a, li_chunk_rows(c, false, x), state, out, c->panels);
    out.add = true;
  }
  for (int64_t first = 0; first < c->rows; first = last) {
    last = li_min(first + LI_HALF, c->rows);
    const li_matrix scores = li_strided(c->scores + first * LI_CHUNK + first, c->rows - first, last - first, LI_CHUNK);
    li_matmul(c->kernels, b, scores, li_lines(z, first, last), out, c->panels);
    out.at += LI_HALF * out.row;
    out.add = true;
  }
}
/* Computes li_causal_bracket with a = 1, exactly causal. A score above the diagonal is 0, and 0 times a finite z
   changes only the sign of a zero. A z that is not finite counts as 0 in the product and is added from its own row on.
   Uses buffer[1]. */
LI_FN void li_causal_exact(const li_causal_chunk *c, float b, li_matrix x, li_matrix y, li_matrix state, li_matrix z,
                           li_out out) {
  const bool clean = c->kernels->all_finite(z);
  li_causal_bracket(c, 1, b, x, y, state, clean ? z : li_finite_copy(z, c->buffer[1]), out);
  if (!clean) li_add_infinite(li_strided(c->scores, c->rows, c->rows, LI_CHUNK), z, 0, LI_CHUNK, out);
}
/* Eq. 7: out = diag(factor / t) [before X M + ((X Y^T) o L) Z]. The last addition removes the sign of a zero. */
LI_FN void li_causal_mix(const li_causal_chunk *c, float factor, li_matrix x, li_matrix y, li_matrix mean, li_matrix z,
                         li_out out) {
  float factors[LI_CHUNK];
  const double base = c->begins ? 1 : c->before; /* Dividing by it keeps the bracket in range. */
  li_causal_exact(c, (float)(1 / base), x, y, mean, z, out);
  li_causal_factors(c, factor, base, factors);
  c->kernels->scale_rows(li_strided(out.at, c->rows, z.columns, out.row), factors, out.at, out.row);
}

/* Computes y = diag(factor / t) x, dense. */
LI_FN li_matrix li_causal_divide(const li_causal_chunk *c, float factor, li_matrix x, float *y) {
  float factors[LI_CHUNK];
  li_causal_factors(c, factor, 1, factors);
  c->kernels->scale_rows(x, factors, y, x.columns);
  return li_dense(y, x.rows, x.columns);
}

/* grad += A R + ((B A^T) o L)^T X, where R is the reverse state. The gradient of Y has A = Z, R^T, B = G; that of Z has
   A = Y, B = X, X = G. */
LI_FN void li_causal_grad_yz(const li_causal_chunk *c, li_matrix b, li_matrix a, li_matrix r,
                             li_matrix x, li_out grad) {
  int64_t last;
  li_chunk_scores(c, b, a);
  if (!c->begins) li_matmul(c->kernels, 1, li_chunk_rows(c, true, a), r, grad, c->panels);
  for (int64_t first = 0; first < c->rows; first = last) {
    last = li_min(first + LI_HALF, c->rows);
    const li_matrix scores = li_strided(c->scores + first * LI_CHUNK, last - first, last, LI_CHUNK);
    li_matmul(c->kernels, 1, li_transposed(scores), li_lines(x, first, last), grad, c->panels);
  }
}

/* ---- The causal product ---- */

/* These return the chunk's rows of a tensor with the strides of x or z, to read or to write. */
LI_FN li_matrix li_causal_at_x(const li_causal_chunk *c, const float *x) {
  const li_causal *a = c->product;
  return li_strided(x + li_causal_xy(a, c->item, c->first), c->rows, a->dim, a->xy_row);
}
LI_FN li_matrix li_causal_at_z(const li_causal_chunk *c, const float *z) {
  const li_causal *a = c->product;
  return li_strided(z + li_causal_z(a, c->item, c->first), c->rows, a->value_dim, a->z_row);
}
LI_FN li_out li_causal_into_x(const li_causal_chunk *c, float *grad) {
  return li_into(grad + li_causal_xy(c->product, c->item, c->first), c->product->xy_row, true);
}
LI_FN li_out li_causal_into_z(const li_causal_chunk *c, float *z, bool add) {
  return li_into(z + li_causal_z(c->product, c->item, c->first), c->product->z_row, add);
}
LI_FN li_matrix li_causal_state(const li_causal_chunk *c) {
  return li_dense(c->state, c->product->dim, c->product->value_dim);
}
/* Sets state to Y^T Z, or in reverse to X^T G. */
LI_FN void li_causal_sum(const li_causal_chunk *c, li_matrix y, li_matrix z) {
  if (c->last) return;
  y = li_chunk_rows(c, !c->reverse, y);
  li_matmul(c->kernels, 1, li_transposed(y), z, li_into(c->state, z.columns, false), c->panels);
}

LI_FN void li_causal_sum_yz(const li_causal_chunk *c) {
  li_causal_sum(c, li_causal_at_x(c, c->product->y), li_causal_at_z(c, c->product->z));
}

LI_FN void li_causal_out(const li_causal_chunk *c) {
  const li_causal *a = c->product;
  li_causal_mix(c, 1, li_causal_at_x(c, a->x), li_causal_at_x(c, a->y), li_causal_state(c), li_causal_at_z(c, a->z),
                li_causal_into_z(c, a->out, false));
}

LI_FN void li_causal_out_x(const li_causal_chunk *c) {
  const li_causal *a = c->product;
  const li_matrix g = li_causal_divide(c, 1, li_causal_at_z(c, a->grad_out), c->buffer[0]);
  li_causal_bracket(c, (float)c->before, 1, g, li_causal_at_z(c, a->z), li_transposed(li_causal_state(c)),
                    li_causal_at_x(c, a->y), li_causal_into_x(c, a->grad_x));
}

/* In reverse: kept = G, and the state is R. */
LI_FN void li_causal_sum_xg(const li_causal_chunk *c) {
  const li_causal *a = c->product;
  const li_matrix g = li_causal_divide(c, 1, li_causal_at_z(c, a->grad_out), c->kept);
  li_causal_sum(c, li_causal_at_x(c, a->x), g);
}

LI_FN void li_causal_out_yz(const li_causal_chunk *c) {
  const li_causal *a = c->product;
  const li_matrix g = li_dense(c->kept, c->rows, a->value_dim), r = li_causal_state(c);
  const li_matrix x = li_causal_at_x(c, a->x), y = li_causal_at_x(c, a->y), z = li_causal_at_z(c, a->z);
  if (a->grad_y) li_causal_grad_yz(c, g, z, li_transposed(r), x, li_causal_into_x(c, a->grad_y));
  if (a->grad_z) li_causal_grad_yz(c, x, y, r, g, li_causal_into_z(c, a->grad_z, true));
}

LI_FN void li_causal_start(li_sweep *s, const li_kernels *kernels, const li_causal *a, bool reverse) {
  li_sweep_set(s, kernels, a->batch, a->heads, a->rows, reverse);
  s->product = a;
  s->dim = a->dim;
  s->value_dim = a->value_dim;
  s->horizon = a->horizon;
  s->slots = 1;
  s->unit = a->dim * a->value_dim;
  s->kept = reverse ? LI_CHUNK * a->value_dim : 0;
}

LI_FN size_t li_causal_scratch(const li_kernels *kernels, const li_causal *a, int64_t threads, bool backward) {
  li_sweep s;
  if (!kernels->panels) return 0;
  li_causal_start(&s, kernels, a, backward); /* Reverse needs more */
  return li_sweep_plan(&s, li_max(1, threads), NULL);
}
/* x, y [batch, rows, heads, dim], z [batch, rows, heads, value_dim] -> out as z. */
LI_FN void li_run_causal(const li_kernels *kernels, const li_causal *a, const li_parallel *parallel, void *scratch) {
  li_sweep s;
  if (!kernels->panels) {
    li_causal_reference(a);
    return;
  }
  li_causal_start(&s, kernels, a, false);
  li_sweep_run(&s, li_causal_sum_yz, li_causal_out, parallel, scratch);
}
LI_FN void li_run_causal_backward(const li_kernels *kernels, const li_causal *a,
                                  const li_parallel *parallel, void *scratch) {
  li_sweep s;
  LI_BY_BACKWARD_REFERENCE(kernels, li_causal_backward_reference(a); return);
  li_causal_start(&s, kernels, a, false);
  if (a->grad_x) li_sweep_run(&s, li_causal_sum_yz, li_causal_out_x, parallel, scratch);
  li_causal_start(&s, kernels, a, true);
  if (a->grad_y || a->grad_z) li_sweep_run(&s, li_causal_sum_xg, li_causal_out_yz, parallel, scratch);
}

/* ---- Causal Luna: masked slots are left out of every product and never read ---- */

/* These return the chunk's rows of q, k, v or out, of s or w without the masked slots, of an output to write, and of a
   dense buffer. */
LI_FN li_matrix li_luna_wide(const li_causal_chunk *c, const float *x) {
  const int64_t d = c->luna->head_dim;
  return li_strided(x + li_luna_row(c->luna, c->item, c->first) * d, c->rows, d, c->luna->heads * d);
}
LI_HOT li_matrix li_luna_narrow(const li_causal_chunk *c, const float *x) {
  const int64_t slots = c->luna->slots;
  return li_strided(x + li_luna_row(c->luna, c->item, c->first) * slots, c->rows, c->slots, c->luna->heads * slots);
}
LI_FN li_out li_luna_into(const li_causal_chunk *c, float *x, bool add) {
  const int64_t d = c->luna->head_dim;
  return li_into(x + li_luna_row(c->luna, c->item, c->first) * d, c->luna->heads * d, add);
}
LI_FN li_matrix li_luna_dense(const li_causal_chunk *c, const float *x) { return li_dense(x, c->rows, c->slots); }

/* The state's parts are [slots, head_dim] each: A^T k and A^T v, or in reverse H^T q and W^T G. */
typedef struct li_luna_sums { li_matrix k, v; } li_luna_sums;
LI_FN li_luna_sums li_luna_sums_of(const li_causal_chunk *c) {
  const int64_t d = c->luna->head_dim, unit = li_luna_unit(c->luna);
  const li_luna_sums s = { li_strided(c->state, c->slots, d, unit), li_strided(c->state + d, c->slots, d, unit) };
  return s;
}
/* Sets the state to the chunk's own sums: a^T x, b^T y and, with forget, the totals of a. */
LI_FN void li_luna_own(const li_causal_chunk *c, li_matrix a, li_matrix x, li_matrix b, li_matrix y,
                       const float *totals) {
  const int64_t d = c->luna->head_dim, unit = li_luna_unit(c->luna);
  if (c->last) return;
  x = li_chunk_rows(c, !c->reverse, x);
  li_matmul(c->kernels, 1, li_transposed(a), x, li_into(c->state, unit, false), c->panels);
  b = li_chunk_rows(c, !c->reverse, b);
  li_matmul(c->kernels, 1, li_transposed(b), y, li_into(c->state + d, unit, false), c->panels);
  for (int64_t slot = 0; totals && slot < c->slots; slot++) {
    c->state[slot * unit + 2 * d] = totals[slot];
    c->state[slot * unit + 2 * d + 1] = 0;
  }
}

/* Computes kept = A = omega(s), or with forget the weights W, with their sums in c->logs. */
LI_FN li_matrix li_luna_weights(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const li_matrix s = li_luna_narrow(c, a->s);
  if (a->forget) {
    const li_matrix gates = li_luna_narrow(c, a->routed ? a->s : a->forget);
    c->kernels->forget_weights(s, gates, li_luna_fade(a, c->item), c->kept, c->logs);
  } else {
    c->kernels->copy_rows(s, c->kept, s.columns);
    c->kernels->activate((int)a->omega, s.rows * s.columns, c->kept, c->kept);
  }
  return li_luna_dense(c, c->kept);
}
LI_FN void li_luna_sum(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const li_matrix w = li_luna_weights(c);
  li_luna_own(c, w, li_luna_wide(c, a->k), w, li_luna_wide(c, a->v), a->forget ? c->logs + 2 * c->slots : NULL);
}

/* W = softmax(scale q K'), kept in a->kept, and out = W V. The sums K and V have the weights A = c->kept. */
LI_FN void li_luna_out(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const int64_t l = c->slots, at = li_luna_row(a, c->item, c->first) * a->slots;
  const li_luna_sums state = li_luna_sums_of(c);
  const li_matrix weights = li_luna_dense(c, c->kept), w = li_luna_dense(c, c->buffer[0]);
  li_causal_mix(c, a->scale, li_luna_wide(c, a->q), li_luna_wide(c, a->k), li_transposed(state.k), weights,
                li_into(c->buffer[0], l, false));
  c->kernels->softmax(c->rows, l, w.at, c->buffer[0]);

  if (LI_TRAINS && a->kept) {
    c->kernels->copy_rows(w, a->kept + at, a->heads * a->slots);
    for (int64_t t = 0; t < c->rows; t++)
      memset(a->kept + at + t * a->heads * a->slots + l, 0, li_bytes(a->slots - l));
  }
  li_causal_mix(c, 1, w, weights, state.v, li_luna_wide(c, a->v), li_luna_into(c, a->out, false));
}

LI_INLINE int64_t li_step_bytes(const li_causal_luna *a) {
  return li_floats((a->forget ? 4 : 1) * a->slots) + li_floats(a->slots) +
         (int64_t)li_round((size_t)(a->slots + li_max(a->slots, a->head_dim)) * sizeof(double));
}
/* Steps one row of an item of the memory that forgets: weights <- (weights + W) e^gate. In the means the new row has
   the share W / (weights + W). w is [4, slots], of which the first row gets what the routed memory adds to scores. */
LI_HOT void li_forget_shares(const li_kernels *kernels, const li_causal_luna *a, int64_t item, double *weights,
                             float *w, double *share) {
  const int64_t l = li_luna_slots(a, item), narrow = item * a->slots;
  const li_matrix s = li_dense(a->s + narrow, 1, l);
  const float fade = li_luna_fade(a, item);
  kernels->forget_weights(s, a->routed ? s : li_dense(a->forget + narrow, 1, l), fade, w, w + l);
  for (int64_t i = 0; i < l; i++) {
    const double gate = li_decay((double)w[l + i]), total = weights[i] + (double)w[i];
    share[i] = li_quotient((double)w[i], total);
    weights[i] = total * gate;
    w[3 * l + i] = (float)total;
  }
  if (a->routed) kernels->route_logs(s, fade, w + 3 * l, w);
}

/* A stream runs eq. 7 row by row, without chunks. */
LI_HOT void li_luna_step(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_sweep *s = (const li_sweep *)work;
  const li_kernels *kernels = s->kernels;
  const li_causal_luna *a = s->luna;
  const int64_t d = a->head_dim;
  const int64_t now = li_within(a->position + 1, a->horizon);
  li_mean_kind k_step = LI_STEP_MEAN, v_step = LI_STEP_MEAN;
  char *scratch = s->threads_at + thread * li_step_bytes(a);
  float *omega = li_take(&scratch, (a->forget ? 4 : 1) * a->slots), *w = li_take(&scratch, a->slots);
  double *share = (double *)(void *)scratch, *sum = share + a->slots;
  if (a->forget) {
    k_step = LI_STEP_KEYS;
    v_step = LI_STEP_VALUES;
  }
  for (int64_t item = first; item < last; item++) {
    const int64_t l = li_luna_slots(a, item), wide = item * d, narrow = item * a->slots;
    const li_luna_state m = li_luna_state_of(a, item, NULL);
    if (a->position == 0) {
      for (int64_t i = 0; i < d; i++) memset(m.ka + i * a->slots, 0, (size_t)l * sizeof(double));
      memset(m.av, 0, (size_t)(l * d) * sizeof(double));
      if (a->forget) memset(m.weights, 0, (size_t)l * sizeof(double));
    }
    if (li_luna_skips(a, item, 0, false)) continue;

    if (a->forget) li_forget_shares(kernels, a, item, m.weights, omega, share);
    else kernels->activate((int)a->omega, l, a->s + narrow, omega);
    kernels->step_mean(k_step, li_mean_of(m.ka, d, l, a->slots, now), share, a->k + wide, omega, a->q + wide, sum);
    for (int64_t i = 0; i < l; i++) w[i] = (float)(sum[i] * (double)a->scale);
    if (a->routed) kernels->add(l, w, omega, w);
    kernels->softmax(1, l, w, w);
    for (int64_t i = 0; i < l && a->routed; i++)
      if (omega[i] == -1e30f) w[i] = 0;
    kernels->step_mean(v_step, li_mean_of(m.av, l, d, d, now), share, omega, a->v + wide, w, sum);
    for (int64_t i = 0; i < d; i++) a->out[wide + i] = (float)sum[i];
    if (LI_TRAINS && a->kept && !a->forget)
      for (int64_t i = 0; i < a->slots; i++) a->kept[narrow + i] = i < l ? w[i] : 0;
  }
}

/* ---- Causal Luna, backward ----
   G = diag(1/t) dOut and H = diag(scale/t) dU [rows, slots]. The forward sweep leaves H for the reverse one. */
/* Computes H and the gradient of q. */
LI_FN void li_luna_out_up(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const int64_t l = c->slots;
  const li_luna_sums state = li_luna_sums_of(c);
  const li_matrix omega = li_luna_dense(c, c->kept);
  const li_matrix g = li_causal_divide(c, 1, li_luna_wide(c, a->grad_out), c->buffer[0]);
  const float before = (float)c->before;
  float *w = c->buffer[0], *dw = c->buffer[1], *du = c->buffer[2];
  li_causal_bracket(c, before, 1, g, li_luna_wide(c, a->v), li_transposed(state.v), omega, li_into(dw, l, false));
  c->kernels->copy_rows(li_luna_narrow(c, a->kept), w, l);
  li_clear(du, li_bytes(c->rows * l));
  c->kernels->softmax_backward(c->rows, l, w, dw, du);
  const li_matrix h = li_causal_divide(c, a->scale, li_luna_dense(c, du), c->h);
  if (a->grad_q)
    li_causal_bracket(c, before, 1, h, omega, state.k, li_luna_wide(c, a->k), li_luna_into(c, a->grad_q, true));
}

/* c->kept holds A and, after it, G. The states are H^T q and W^T G. */
LI_FN void li_luna_sum_down(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const int64_t l = li_luna_weights(c).columns;
  const li_matrix g = li_causal_divide(c, 1, li_luna_wide(c, a->grad_out), c->kept + LI_CHUNK * l);
  li_luna_own(c, li_luna_dense(c, c->h), li_luna_wide(c, a->q), li_luna_narrow(c, a->kept), g, NULL);
}
/* Adds the gradients of k and v, and returns the gradient of A, or null if it is not needed. g is the gradient of out,
   and r the weights with which out read v. */
LI_FN float *li_luna_grads(const li_causal_chunk *c, li_matrix g, li_matrix r) {
  const li_causal_luna *a = c->luna;
  const li_luna_sums state = li_luna_sums_of(c);
  const li_matrix w = li_luna_dense(c, c->kept), h = li_luna_dense(c, c->h);
  const li_matrix q = li_luna_wide(c, a->q), k = li_luna_wide(c, a->k), v = li_luna_wide(c, a->v);
  float *dw = c->buffer[0];
  if (a->grad_k) li_causal_grad_yz(c, h, w, state.k, q, li_luna_into(c, a->grad_k, true));
  if (a->grad_v) li_causal_grad_yz(c, r, w, state.v, g, li_luna_into(c, a->grad_v, true));
  if (!a->grad_s && !a->grad_forget) return NULL;
  li_clear(dw, li_bytes(c->rows * c->slots));
  li_causal_grad_yz(c, q, k, li_transposed(state.k), h, li_into(dw, c->slots, true));
  li_causal_grad_yz(c, g, v, li_transposed(state.v), r, li_into(dw, c->slots, true));
  return dw;
}
LI_FN void li_luna_out_down(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const int64_t l = c->slots;
  float *s = c->buffer[1], *ds = c->buffer[2];
  const li_matrix g = li_dense(c->kept + LI_CHUNK * l, c->rows, a->head_dim);
  const float *domega = li_luna_grads(c, g, li_luna_narrow(c, a->kept));
  if (!domega) return;
  c->kernels->copy_rows(li_luna_narrow(c, a->s), s, l);
  c->kernels->copy_rows(li_luna_narrow(c, a->grad_s), ds, l);
  c->kernels->activate_grad((int)a->omega, c->rows * l, s, domega, true, ds);
  c->kernels->copy_rows(li_luna_dense(c, ds), a->grad_s + li_luna_row(a, c->item, c->first) * a->slots,
                        a->heads * a->slots);
}

/* ---- The memory that forgets ----
   In a chunk, c_t is the sum of the gates' logs up to row t, and W_t = e^{s_t - c_t}. The state has the weighted sums
   of k, v and 1. With S_K, S_V and z the state before the chunk, and j <= t in the chunk:
     Z_t = z + sum W_j,  u_t = scale / Z_t (q_t S_K + sum (q_t . k_j) W_j),  r_t = softmax(u_t) / Z_t,
     out_t = r_t S_V + sum (r_t . W_j) v_j
   After the chunk S <- (S + sum W_j^T k_j) e^{c_end}. Only ratios of weights count, so e^{-c_t} stays within what
   LUNA_FORGET_SCALE allows for, and nothing reads a later row.
   Backward, g is the gradient of out, dr = g S_V^T + sum (g . v_j) W_j, and dZ = -(r dr + u du) / Z (never 1/Z^2, which
   leaves float's range). The gradients of k, v and W are sums over later rows, with the state's gradient R in reverse.
   A gate makes all earlier weights smaller, or all weights from its row on larger. Its gradient is therefore minus the
   sum of their W dW. From a chunk's end on this sum is also minus R . S, because out does not change when all weights
   and the state are scaled. Where a slot forgets fast, that is more exact than the long sum. */
/* Returns the state's z, or zeros, as an array. */
LI_HOT const float *li_forget_before(const li_causal_chunk *c) {
  const int64_t unit = li_luna_unit(c->luna);
  float *before = c->logs + 3 * c->slots;
  for (int64_t i = 0; i < c->slots; i++) before[i] = c->begins ? 0 : c->state[i * unit + unit - 2];
  return before;
}
LI_HOT void li_forget_drop(const li_causal_chunk *c, float *w) {
  const li_causal_luna *a = c->luna;
  const int64_t l = c->slots;
  if (!LI_DROPS(a)) return;
  for (int64_t t = 0; t < c->rows; t++, w += l)
    c->kernels->dropout(&a->own->dropout, li_luna_row(a, c->item, c->first + t) * a->slots, l, w, w, false);
}
/* Returns the floats of U, Z or H over all rows. A chunk's part starts at its first row and is dense. */
LI_INLINE int64_t li_forget_all(const li_causal_luna *a) { return a->batch * a->heads * a->rows * a->slots; }
LI_INLINE int64_t li_forget_sums(const li_causal_luna *a) {
  return a->batch * a->heads * li_divide_up(a->rows, LI_CHUNK) * a->slots * li_luna_unit(a);
}
LI_INLINE float *li_forget_kept(const li_causal_chunk *c) {
  return li_offset(LI_TRAINS ? c->luna->kept : NULL, (c->item * c->luna->rows + c->first) * c->luna->slots);
}

/* Computes softmax(u), or softmax(u + logs) in the routed memory. */
LI_FN void li_forget_softmax(const li_causal_chunk *c, const float *u, const float *logs, float *p) {
  if (c->luna->routed) {
    c->kernels->add(c->rows * c->slots, u, logs, p);
    u = p;
  }
  c->kernels->softmax(c->rows, c->slots, u, p);
}

LI_FN void li_forget_out(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const li_luna_sums state = li_luna_sums_of(c);
  const int64_t l = c->slots, n = c->rows * l;
  const li_matrix q = li_luna_wide(c, a->q), k = li_luna_wide(c, a->k), w = li_luna_dense(c, c->kept);
  const li_out out = li_luna_into(c, a->out, false);
  float *kept = li_forget_kept(c), *r = c->buffer[0], ones[LI_CHUNK];
  float *u = r, *z = c->buffer[2];
  if (kept) {
    u = kept;
    z = kept + li_forget_all(a);
  }

  c->kernels->forget_totals(w, li_forget_before(c), z);
  li_causal_exact(c, 1, q, k, li_transposed(state.k), w, li_into(u, l, false));
  if (a->routed) c->kernels->route_logs(li_luna_narrow(c, a->s), li_luna_fade(a, c->item), z, c->buffer[1]);
  c->kernels->forget_divide(n, a->scale, u, z, u);
  li_forget_softmax(c, u, c->buffer[1], r);
  li_forget_drop(c, r);
  c->kernels->forget_divide(n, 1, r, z, r);

  li_causal_exact(c, 1, li_luna_dense(c, r), w, state.v, li_luna_wide(c, a->v), out);
  for (int i = 0; i < LI_CHUNK; i++) ones[i] = 1; /* Scaling by 1 removes a zero's sign. */
  c->kernels->scale_rows(li_strided(out.at, c->rows, a->head_dim, out.row), ones, out.at, out.row);
}

/* The forward sweep adds the gradient of q, and leaves H = scale / Z dU, R = W / Z and dZ for the reverse one. */
LI_FN void li_forget_out_up(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const li_luna_sums state = li_luna_sums_of(c);
  const int64_t l = c->slots, n = c->rows * l, all = li_forget_all(a), unit = li_luna_unit(a);
  const li_matrix w = li_luna_dense(c, c->kept), g = li_luna_wide(c, a->grad_out);
  float *dr = c->buffer[0], *p = c->buffer[1], *dp = c->buffer[2], *r = c->h + all;
  const float *u = li_forget_kept(c);
  float *z = li_forget_kept(c) + all;
  if (a->routed) c->kernels->route_logs(li_luna_narrow(c, a->s), li_luna_fade(a, c->item), z, dp);
  li_forget_softmax(c, u, dp, p);
  memcpy(r, p, li_bytes(n));
  li_forget_drop(c, r);
  c->kernels->forget_divide(n, 1, r, z, r);

  li_causal_bracket(c, 1, 1, g, li_luna_wide(c, a->v), li_transposed(state.v), w, li_into(dr, l, false));
  c->kernels->forget_divide(n, 1, dr, z, dp);
  li_forget_drop(c, dp);
  li_clear(c->h, li_bytes(n));
  c->kernels->softmax_backward(c->rows, l, p, dp, c->h);
  c->kernels->forget_slopes(n, a->scale, a->routed, u, z, r, dr, c->h, r + all);

  if (a->grad_q)
    li_causal_bracket(c, 1, 1, li_luna_dense(c, c->h), w, state.k, li_luna_wide(c, a->k),
                      li_luna_into(c, a->grad_q, true));
  memcpy(c->sums, c->state, li_bytes(l * unit));
  for (int64_t slot = 0; slot < l; slot++) c->sums[slot * unit + unit - 1] = (float)li_chunk_fade(c, slot);
}
/* Computes the sum of W dW after the chunk from the gradient of the state. The sum of two floats that holds it replaces
   the first sums of the next chunk, which nothing else reads then. */
LI_HOT void li_forget_anchor(const li_causal_chunk *c) {
  const int64_t unit = li_luna_unit(c->luna);
  float *next = c->sums + c->luna->slots * unit;
  if (c->first + c->rows >= c->luna->rows) return;
  for (int64_t slot = 0; slot < c->slots; slot++, next += unit) {
    double sum = 0;
    for (int64_t i = 0; i < unit - 1; i++) sum -= (double)c->state[slot * unit + i] * (double)next[i];
    next[0] = (float)sum;
    next[1] = (float)(sum - (double)next[0]);
  }
}

/* Sums H^T q, R^T g and dZ, which are one after the other in c->h, for the reverse state: the gradient of the forward
   state after the chunk. */
LI_FN void li_forget_sum_down(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const int64_t l = li_luna_weights(c).columns, all = li_forget_all(a);
  float *totals = c->logs + 3 * l;
  if (c->last) return;
  memset(totals, 0, li_bytes(l));
  c->kernels->sum_rows(li_luna_dense(c, c->h + 2 * all), 1, totals);
  li_luna_own(c, li_luna_dense(c, c->h), li_luna_wide(c, a->q), li_luna_dense(c, c->h + all),
              li_luna_wide(c, a->grad_out), totals);
}

/* Adds the gradients of k, v and s, and replaces H by W dW, or by W dW - dU in the routed memory. */
LI_FN void li_forget_out_down(const li_causal_chunk *c) {
  const li_causal_luna *a = c->luna;
  const int64_t l = c->slots, all = li_forget_all(a), unit = li_luna_unit(a);
  const li_matrix s = li_luna_narrow(c, a->s);
  li_forget_anchor(c);
  for (int64_t slot = 0; slot < l && !c->begins; slot++)
    c->kernels->scale(unit, (float)li_chunk_fade(c, slot), c->state + slot * unit, c->state + slot * unit);
  float *dw = li_luna_grads(c, li_luna_wide(c, a->grad_out), li_luna_dense(c, c->h + all));
  if (!dw) return;
  c->kernels->forget_scores(s, c->kept, c->h + 2 * all, li_forget_before(c), a->routed ? li_forget_kept(c) + all : NULL,
                            a->scale, dw, li_offset(a->grad_s, s.at - a->s), c->h);
}

LI_HOT void li_forget_gates(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_sweep *s = (const li_sweep *)work;
  const li_causal_luna *a = s->luna;
  float *after = (float *)(void *)(s->threads_at + thread * s->thread_bytes);
  const float *from = a->routed ? a->s : a->forget;
  float *to = a->routed ? a->grad_s : a->grad_forget;

  for (int64_t item = first; item < last; item++) {
    memset(after, 0, li_bytes(4 * a->slots));
    for (int64_t k = 0; k < s->chunks; k++) {
      const li_causal_chunk c = li_sweep_chunk(s, item, k, 0, thread);
      const li_matrix gates = li_luna_narrow(&c, from);
      const float *next = c.sums + a->slots * s->unit;
      if (k > 0)
        for (int64_t i = 0; i < gates.columns; i++, next += s->unit) {
          if (next[s->unit - 1] >= 0.5f) continue; /* The next chunk forgets less than half. */
          after[i] = next[0];
          after[gates.columns + i] = next[1];
        }
      s->kernels->forget_gates(gates, a->routed, c.h, after, li_offset(to, gates.at - from));
    }

    const int64_t l = li_luna_slots(a, item);
    double sum = 0;
    for (int64_t i = 2 * l; i < 4 * l; i++) sum += (double)after[i];
    if (a->routed) s->sums[item * s->chunks * a->slots * s->unit] = (float)sum; /* The first chunk's sums are free. */
  }
}
/* Adds the gradients of fades, item after item, from these sums. */
LI_FN void li_route_fades(const li_sweep *s) {
  const li_causal_luna *a = s->luna;
  for (int64_t item = 0; item < s->items && a->grad_forget; item++) {
    const float slope = li_activation_scalar(LUNA_ACTIVATION_SIGMOID, -a->forget[item % a->heads]);
    a->grad_forget[item % a->heads] += s->sums[item * s->chunks * a->slots * s->unit] * li_luna_fade(a, item) * slope;
  }
}

LI_FN void li_luna_start(li_sweep *s, const li_kernels *kernels, const li_causal_luna *a, bool reverse) {
  li_sweep_set(s, kernels, a->batch, a->heads, a->rows, reverse);
  s->luna = a;
  s->forgets = a->forget != NULL;
  s->continues = a->state && a->rows > 0 && !reverse;
  s->horizon = a->horizon;
  s->dim = a->head_dim;
  s->value_dim = s->slots = a->slots;
  s->unit = li_luna_unit(a);
  s->kept = LI_CHUNK * a->slots;
  if (s->forgets) s->kept += 4 * a->slots;
  else if (reverse) s->kept += LI_CHUNK * a->head_dim;
}

LI_FN size_t li_causal_luna_scratch(const li_kernels *kernels, const li_causal_luna *a, int64_t threads,
                                    bool backward) {
  li_sweep s;
  threads = li_max(1, threads);
  LI_BY_BACKWARD_REFERENCE(kernels, if (backward) return li_causal_luna_backward_scratch_reference(a));
  if (!kernels->panels) return li_causal_luna_scratch_reference(a);
  if (li_luna_steps(a)) return (size_t)(threads * li_step_bytes(a));
  li_luna_start(&s, kernels, a, backward);
  size_t bytes = li_sweep_plan(&s, threads, NULL);
  if (backward) bytes += (size_t)li_floats((a->forget ? 3 : 1) * li_forget_all(a));
  if (backward && a->forget) bytes += (size_t)li_floats(li_forget_sums(a));
  return bytes;
}

/* q, k, v [batch, rows, heads, head_dim], s [batch, rows, heads, slots] -> out as q. */
LI_FN void li_run_causal_luna(const li_kernels *kernels, const li_causal_luna *a,
                              const li_parallel *parallel, void *scratch) {
  li_sweep s;
  if (!kernels->panels) {
    li_causal_luna_reference(a, scratch);
    return;
  }
  if (li_luna_steps(a)) { /* It reads only these three fields. */
    const int64_t items = a->batch * a->heads;
    s.kernels = kernels;
    s.luna = a;
    s.threads_at = (char *)scratch;
    li_each(li_worth(parallel, items * a->head_dim * a->slots), items, li_luna_step, &s);
    return;
  }

  li_luna_start(&s, kernels, a, false);
  li_sweep_run(&s, li_luna_sum, a->forget ? li_forget_out : li_luna_out, parallel, scratch);
}

LI_FN void li_run_causal_luna_backward(const li_kernels *kernels, const li_causal_luna *a,
                                       const li_parallel *parallel, void *scratch) {
  char *rest = (char *)scratch;
  float *h = li_take(&rest, (a->forget ? 3 : 1) * li_forget_all(a));
  float *sums = a->forget ? li_take(&rest, li_forget_sums(a)) : NULL;
  li_sweep s;
  LI_BY_BACKWARD_REFERENCE(kernels, li_causal_luna_backward_reference(a, scratch); return);

  li_luna_start(&s, kernels, a, false);
  s.h = h;
  s.sums = sums;
  s.reads = true;
  li_sweep_run(&s, li_luna_sum, a->forget ? li_forget_out_up : li_luna_out_up, parallel, rest);
  if (!a->grad_k && !a->grad_v && !a->grad_s && !a->grad_forget) return;

  li_luna_start(&s, kernels, a, true);
  s.h = h;
  s.sums = sums;
  if (a->forget) li_sweep_run(&s, li_forget_sum_down, li_forget_out_down, parallel, rest);
  else li_sweep_run(&s, li_luna_sum_down, li_luna_out_down, parallel, rest);
  if (a->grad_forget || (a->routed && a->grad_s))
    li_each(li_worth(parallel, s.items * s.rows * s.dim * s.value_dim), s.items, li_forget_gates, &s);
  if (a->routed) li_route_fades(&s);
}
#endif

/* ----------------
   >>table: the kernels of an instruction set, and its loops; null where LUNA_NO_TRAIN leaves them out
   ---------------- */
#ifndef LI_PASS
#ifdef LI_BACKWARD_REFERENCE
#include LI_BACKWARD_REFERENCE
#endif
static LI_UNUSED const li_kernels li_kernels_reference = {
  1, 1, LUNA_ISA_REFERENCE, NULL, NULL, NULL,
#define LI_FIELD(result, name, arguments) li_##name##_reference,
#define LI_FIELD_TRAIN(result, name, arguments) LI_TRAIN(li_##name##_reference),
#define LI_FIELD_BACKWARD(result, name, arguments) LI_BACKWARD_OF_REFERENCE(name),
#define LI_NONE(result, name, arguments) NULL,
  LI_KERNELS(LI_FIELD, LI_FIELD_TRAIN, LI_FIELD_BACKWARD)
  LI_LOOPS(LI_NONE, LI_NONE)
#undef LI_FIELD
#undef LI_FIELD_TRAIN
#undef LI_FIELD_BACKWARD
#undef LI_NONE
};
#endif

#ifdef LI_G
#if LI_PASS == LI_BASELINE
static const li_kernels li_kernels_baseline = {
#else
static const li_kernels LI_K(kernels) = {
#endif
  LI_MR, LI_NR, (luna_isa)LI_PASS, &LI_G(float_products),
#ifdef LUNA_NO_BF16
  NULL,
#elif LI_IS(bf16) || LI_IS(amx)
  &LI_K(word_products),
#else
  &LI_G(word_products),
#endif
#ifdef LUNA_NO_INT8
  NULL,
#elif LI_IS(bf16)
  &li_int8_loops_vnni,
#else
  &LI_K(int8_loops),
#endif
#define LI_FIELD(result, name, arguments) LI_G(name),
#define LI_FIELD_TRAIN(result, name, arguments) LI_TRAIN(LI_G(name)),
  LI_KERNELS(LI_FIELD, LI_FIELD_TRAIN, LI_FIELD_TRAIN)
  LI_LOOPS(LI_FIELD, LI_FIELD_TRAIN)
#undef LI_FIELD
#undef LI_FIELD_TRAIN
};
#endif


#ifndef LI_PASS
#define LI_IMPLEMENTED

/* ----------------
   >>dispatch: one pass for each instruction set, and the choice among them at run time
   "Adding an instruction set" in examples/guide.md lists what a new one needs.
   ---------------- */
/* These are luna_isa's numbers, for #if. */
#define LI_IS(name) (LI_PASS == LI_ISA_##name)
#define LI_ISA_scalar 1
#define LI_ISA_sse2 2
#define LI_ISA_avx2 3
#define LI_ISA_avx512 4
#define LI_ISA_neon 5
#define LI_ISA_wasm 6
#define LI_ISA_avxvnni 8
#define LI_ISA_vnni 9
#define LI_ISA_bf16 10
#define LI_ISA_amx 11
#ifndef LUNA_HEADER_FILENAME
#define LUNA_HEADER_FILENAME "luna.h"
#endif

/* LI_BASELINE is the best that the compiler promises. Passes below it are left out. On x86, passes above it follow,
   each with its target switched on. */
#if defined(LUNA_NO_SIMD) || defined(LI_DOUBLE) || defined(__CUDACC__)
#define LI_BASELINE LI_ISA_scalar
#elif (defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))) || \
  (defined(_M_X64) && !defined(_M_ARM64EC) && defined(LI_MSVC))
#include <immintrin.h>
/* The immintrin.h of older clang-cl has only the instruction sets that the compiler promises, so there are no other
   passes. */
#if !defined(_MSC_VER) || !defined(__clang__) || defined(__AVX512BF16INTRIN_H)
#define LI_X86
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LI_BASELINE LI_ISA_avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define LI_BASELINE LI_ISA_avx2
#else
#define LI_BASELINE LI_ISA_sse2
#endif
#define LI_PRAGMA(text) _Pragma(#text)
#if defined(LI_MSVC)
#include <intrin.h>
#define LI_TARGET(features)
#define LI_TARGET_END
#elif defined(__clang__)
#define LI_TARGET(features) \
  LI_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define LI_TARGET_END _Pragma("clang attribute pop")
#else
#define LI_TARGET(features) _Pragma("GCC push_options") LI_PRAGMA(GCC target(features))
#define LI_TARGET_END _Pragma("GCC pop_options")
#endif
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define LI_BASELINE LI_ISA_neon
#include <arm_neon.h>
#elif defined(__wasm_simd128__)
#define LI_BASELINE LI_ISA_wasm
#include <wasm_simd128.h>
#else
#define LI_BASELINE LI_ISA_scalar
#endif

#define LI_PASS LI_ISA_scalar
#include LUNA_HEADER_FILENAME
#undef LI_PASS
#if LI_BASELINE != LI_ISA_scalar
#define LI_PASS LI_BASELINE
#include LUNA_HEADER_FILENAME
#undef LI_PASS
#endif
#ifdef LI_X86
/* Compilers that know an instruction set. Apple counts clang's versions otherwise. Red Hat's gcc 11 has an assembler
   without AVX-VNNI and AMX. */
#if defined(__apple_build_version__)
#define LI_COMPILER(gcc, clang, apple) (__clang_major__ >= (apple))
#elif defined(__clang__)
#define LI_COMPILER(gcc, clang, apple) (__clang_major__ >= (clang))
#elif defined(__GNUC_RH_RELEASE__)
#define LI_COMPILER(gcc, clang, apple) (__GNUC__ >= ((gcc) == 11 ? 12 : (gcc)))
#elif defined(__GNUC__)
#define LI_COMPILER(gcc, clang, apple) (__GNUC__ >= (gcc))
#else
#define LI_COMPILER(gcc, clang, apple) 0
#endif
#if LI_BASELINE < LI_ISA_avx2
LI_TARGET("avx2,fma")
#define LI_PASS LI_ISA_avx2
#include LUNA_HEADER_FILENAME
#undef LI_PASS
LI_TARGET_END
#endif
#if !defined(LUNA_NO_INT8) && LI_BASELINE <= LI_ISA_avx2 && LI_COMPILER(11, 12, 13)
#define LI_AVXVNNI
LI_TARGET("avxvnni,avx2,fma")
#define LI_PASS LI_ISA_avxvnni
#include LUNA_HEADER_FILENAME
#undef LI_PASS
LI_TARGET_END
#endif
#if LI_BASELINE < LI_ISA_avx512
LI_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LI_PASS LI_ISA_avx512
#include LUNA_HEADER_FILENAME
#undef LI_PASS
LI_TARGET_END
#endif
#if !defined(LUNA_NO_INT8) && (defined(LI_MSVC) || LI_COMPILER(8, 6, 10))
#define LI_AVX512VNNI
LI_TARGET("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LI_PASS LI_ISA_vnni
#include LUNA_HEADER_FILENAME
#undef LI_PASS
LI_TARGET_END
#endif

#if !defined(LUNA_NO_BF16) && !defined(LI_MSVC) && LI_COMPILER(10, 9, 12)
#define LI_AVX512BF16
LI_TARGET("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LI_PASS LI_ISA_bf16
#include LUNA_HEADER_FILENAME
#undef LI_PASS
LI_TARGET_END
#endif

#if defined(LI_AVX512BF16) && !defined(LUNA_NO_AMX) && defined(__linux__) && LI_COMPILER(11, 12, 13)
#define LI_AMX
LI_TARGET("amx-tile,amx-bf16,amx-int8,avx512vnni,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LI_PASS LI_ISA_amx
#include LUNA_HEADER_FILENAME
#undef LI_PASS
LI_TARGET_END
#endif

#ifdef LI_MSVC
LI_FN void li_cpuid(uint32_t leaf, uint32_t part, uint32_t out[4]) {
  int r[4];
  __cpuidex(r, (int)leaf, (int)part);
  memcpy(out, r, sizeof r);
}
LI_FN uint32_t li_xgetbv(void) { return (uint32_t)_xgetbv(0); }
#else
LI_FN void li_cpuid(uint32_t leaf, uint32_t part, uint32_t out[4]) {
  __asm__ volatile("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(part));
}
LI_FN uint32_t li_xgetbv(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
#endif
/* Returns a bit for each luna_isa that the processor has and the system saves (xgetbv). Bit 0 says that vdpbf16ps does
   more products in a cycle than float32's FMA, as on AMD processors; on Intel's it does half as many. Leaf 0x1D is read
   because some virtual machines show AMX but have no tiles. */
LI_FN int li_isa_detect(void) {
  int known = 1 << LI_BASELINE | 1 << LUNA_ISA_REFERENCE;
  const uint32_t avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, amx = 1u << 22 | 3u << 24;
  uint32_t r[4], more[4] = { 0, 0, 0, 0 }, tiles[4] = { 0, 0, 0, 0 };
  li_cpuid(0, 0, r);
  const uint32_t leaves = r[0];
  if (r[1] == 0x68747541 || r[1] == 0x6F677948) known |= 1; /* "Auth"enticAMD, "Hygo"nGenuine */
  if (leaves < 7) return known;
  li_cpuid(1, 0, r);
  if ((r[2] & (1u << 27)) == 0 || (r[2] & (1u << 12)) == 0) return known; /* OSXSAVE, FMA */
  const uint32_t saved = li_xgetbv();
  li_cpuid(7, 0, r);
  if ((saved & 6) != 6 || (r[1] & avx2) == 0) return known;
  if (r[0] >= 1) li_cpuid(7, 1, more);
  known |= 1 << LUNA_ISA_AVX2;
  if (more[0] & (1u << 4)) known |= 1 << LUNA_ISA_AVX2_VNNI;
  if ((saved & 0xE0) != 0xE0 || (r[1] & avx512) != avx512) return known;
  known |= 1 << LUNA_ISA_AVX512;
  if ((r[2] & (1u << 11)) == 0) return known;
  known |= 1 << LUNA_ISA_AVX512_VNNI;
#ifdef LI_TILES_EMULATED /* Tests put functions in place of these instructions. */
  known |= 1 << LUNA_ISA_AVX512_BF16 | 1 << LUNA_ISA_AMX;
#endif
  if ((more[0] & (1u << 5)) == 0) return known;
  known |= 1 << LUNA_ISA_AVX512_BF16;
  if (leaves >= 0x1D) li_cpuid(0x1D, 0, tiles);
  if ((saved >> 17 & 3) == 3 && (r[3] & amx) == amx && tiles[0] >= 1) known |= 1 << LUNA_ISA_AMX;
  return known;
}
#endif /* LI_X86 */

/* CPUID traps in virtual machines, so its answer is kept in the only global. It is written once, always with the same
   value. */
LI_FN int li_isa_known(void) {
#if !defined(LI_X86)
  return 1 << LI_BASELINE | 1 << LUNA_ISA_REFERENCE;
#elif defined(LI_MSVC)
  static volatile int known;
  int isa = known;
  if (isa == 0) known = isa = li_isa_detect();
  return isa;
#else
  static int known;
  int isa = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (isa == 0) {
    isa = li_isa_detect();
    __atomic_store_n(&known, isa, __ATOMIC_RELAXED);
  }
  return isa;
#endif
}
/* Asks Linux to let all threads of this process use tiles, permanently. From then on Linux refuses signal stacks that
   are too small for tiles. Returns false if Linux declines, for instance because a thread has such a stack. */
LI_FN bool li_tiles_permitted(void) {
#if defined(LI_AMX) && !defined(LI_TILES_EMULATED)
  const uint64_t tiles = 1u << 18; /* XTILEDATA */
  for (int attempt = 0; attempt < 2; attempt++) {
    uint64_t have = 0;
    long result;
    __asm__ volatile("syscall" : "=a"(result) /* arch_prctl(ARCH_GET_XCOMP_PERM, &have) */
                     : "a"(158L), "D"(0x1022L), "S"(&have) : "rcx", "r11", "memory");
    if (result == 0 && (have & tiles)) return true;
    if (attempt == 0)
      __asm__ volatile("syscall" : "=a"(result) /* ARCH_REQ_XCOMP_PERM */
                       : "a"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
  }
  return false;
#else
  return true;
#endif
}

/* The best first */
static const li_kernels *const li_all_kernels[] = {
#ifdef LI_AMX
  &li_kernels_amx,
#endif
#ifdef LI_AVX512BF16
  &li_kernels_bf16,
#endif
#ifdef LI_X86
#ifdef LI_AVX512VNNI
  &li_kernels_vnni,
#endif
#if LI_BASELINE < LI_ISA_avx512
  &li_kernels_avx512,
#endif
#ifdef LI_AVXVNNI
  &li_kernels_avxvnni,
#endif
#if LI_BASELINE < LI_ISA_avx2
  &li_kernels_avx2,
#endif
#endif
  &li_kernels_baseline,
  &li_kernels_reference
};
/* Returns the kernels of an instruction set, or null if this build or machine lacks it. LUNA_ISA_BEST is the best
   available set other than AMX. */
LI_CALL const li_kernels *li_kernels_of(luna_isa isa) {
  const int known = li_isa_known(), slow = known & 1 ? 0 : 1 << LUNA_ISA_AVX512_BF16;
  const int best = known & ~(1 << LUNA_ISA_AMX | 1 << LUNA_ISA_REFERENCE | slow);
  int wanted = 0;
  if (isa == LUNA_ISA_BEST) wanted = best;
  else if ((unsigned)isa < 31) wanted = known & 1 << isa;
  if (isa == LUNA_ISA_AMX && wanted && !li_tiles_permitted()) return NULL;
  for (int i = 0; i < LI_LENGTH(li_all_kernels); i++)
    if (wanted >> li_all_kernels[i]->isa & 1) return li_all_kernels[i];
  return NULL;
}
/* Returns the kernels of a context or stream. `tiles` says that it has products in 16 or 8 bits, for which AMX is best
   if permitted. */
LI_FN const li_kernels *li_kernels_for(luna_isa isa, bool tiles) {
  const li_kernels *amx = tiles && isa == LUNA_ISA_BEST ? li_kernels_of(LUNA_ISA_AMX) : NULL;
  if (amx) return amx;
  return li_kernels_of(isa);
}
LUNA_API luna_isa luna_isa_best(void) { return li_kernels_of(LUNA_ISA_BEST)->isa; }
LUNA_API bool luna_isa_available(luna_isa isa) { return li_kernels_of(isa) != NULL; }

LUNA_API const char *luna_isa_name(luna_isa isa) {
  static const char *const name[] = { /* In luna_isa's order */
    "best", "scalar", "SSE2", "AVX2", "AVX-512", "NEON", "WASM SIMD128", "reference", "AVX2 VNNI", "AVX-512 VNNI",
    "AVX-512 BF16", "AMX"
  };
  if ((unsigned)isa < LI_LENGTH(name)) return name[isa];
  return "unknown";
}

#undef LI_FN
#define LI_FN static LI_UNUSED LI_RARE
#undef LUNA_API
#define LUNA_API LI_RARE

/* ----------------
   >>impl_status: version, statuses, and the sentences of errors
   All come from LUNA_ERRORS and luna_status; add new ones there. Guarded by tests/robust/mistakes.c.
   ---------------- */
LUNA_API int luna_version(void) { return LUNA_VERSION_NUMBER; }
LUNA_API const char *luna_status_text(luna_status status) {
  static const char *const text[] = { /* In luna_status's order */
    "ok", "bad argument", "out of memory", "bad file", "cannot read", "cannot write", "names or shapes differ",
    "unsupported", "the device failed", "not finite"
  };
  if ((unsigned)status < LI_LENGTH(text)) return text[status];
  return "unknown status";
}

LI_FN const char *li_sentence_of(luna_error_id id) {
  switch ((int)id) {
#define LI_ERROR(id, status, sentence) case LUNA_ERROR_##id: return sentence;
    LUNA_ERRORS(LI_ERROR)
#undef LI_ERROR
    default: return "";
  }
}
#define LI_ERROR(id, status, sentence) (uint8_t)LUNA_##status,
static const uint8_t li_statuses[] = { (uint8_t)LUNA_OK, LUNA_ERRORS(LI_ERROR) };
#undef LI_ERROR

/* ----------------
   >>impl_functions: the calls without a context
   Each kind has three functions: li_..._of, which checks public arguments and turns them into a kernel's, with strides
   in place of zeros; the size of the scratch; and the call. To add a kind, write these three,
   and cases in tests/engine/ops.c and tests/robust/arguments.c, which guard this chapter with tests/engine/gradients.c.
   ---------------- */
LUNA_API void luna_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
  if (counter && out) li_philox(counter, key, out);
}

LI_FN li_parallel li_parallel_of(const luna_run *run) {
  li_parallel p = { run->parallel_for, run->parallel_user, 1 };
  if (run->parallel_for && run->threads > 1) p.threads = li_min(run->threads, LI_MAX_THREADS);
  return p;
}

/* Returns a run's scratch, aligned. If it has less than `need` bytes, returns null and selects the reference, which
   needs none. */
LI_FN void *li_scratch_of(const luna_run *run, size_t need, const li_kernels **kernels) {
  const uintptr_t at = (uintptr_t)run->scratch, aligned = (at + (LI_ALIGN - 1)) & ~(uintptr_t)(LI_ALIGN - 1);
  const size_t shift = (size_t)(aligned - at);
  if (run->scratch && run->scratch_size >= shift && run->scratch_size - shift >= need) return (void *)aligned;
  *kernels = &li_kernels_reference;
  return NULL;
}
/* Returns the size of a scratch that is enough for forward and backward at any alignment. */
LI_FN size_t li_scratch_for(size_t forward, size_t backward) {
  return (forward > backward ? forward : backward) + LI_ALIGN;
}

/* The reference, which also runs if there is no scratch, has no backward pass. */
LI_FN luna_status li_reference_status(const luna_run *run, const li_kernels *kernels, bool backward) {
  if (!backward || LI_REFERENCE_TRAINS || kernels != &li_kernels_reference) return LUNA_OK;
  if (run->isa == LUNA_ISA_REFERENCE) return LUNA_UNSUPPORTED;
  return LUNA_OUT_OF_MEMORY;
}

/* Sets *stride, the distance between `count` parts of `extent` floats, to `given`, or to `dense` if that is 0. Returns
   how many floats the parts span, or -1 if a size or a stride is negative or a product is too large. */
LI_FN int64_t li_extent(int64_t extent, int64_t count, int64_t given, int64_t dense, int64_t *stride) {
  const int64_t last = li_checked(li_max(count, 1) - 1, *stride = given ? given : dense);
  if (extent < 0 || count < 0 || last < 0 || dense < 0 || extent > LI_MAX_COUNT - last) return -1;
  return extent + last;
}
/* Does the same for the batch of an input, which may share one part. */
LI_FN int64_t li_extent_shared(int64_t extent, int64_t count, int64_t given, int64_t dense, int64_t *stride) {
  if (given != LUNA_BATCH_SHARED) return li_extent(extent, count, given, dense, stride);
  *stride = 0;
  if (li_checked(count, 1) < 0) return -1;
  return extent;
}

/* --- GEMM --- */
LI_FN bool li_gemm_of(const luna_gemm_args *args, li_gemm *g) {
  const int64_t batch = args->batch ? args->batch : 1;
  const int64_t a_width = args->transpose_a ? args->m : args->k;
  const int64_t b_width = args->transpose_b ? args->k : args->n;
  const int64_t a_height = args->transpose_a ? args->k : args->m;
  const int64_t b_height = args->transpose_b ? args->n : args->k;
  memset(g, 0, sizeof *g);
  if (args->m < 0 || args->n < 0 || args->k < 0) return false;
  if (!li_is_activation(args->activation) || !li_is_finite(args->scale)) return false;

  int64_t a = li_extent(a_width, a_height, args->a_row, a_width, &g->a_row);
  int64_t b = li_extent(b_width, b_height, args->b_row, b_width, &g->b_row);
  int64_t c = li_extent(args->n, args->m, args->c_row, args->n, &g->c_row);
  a = li_extent_shared(a, batch, args->a_batch, li_checked(g->a_row, a_height), &g->a_batch[1]);
  b = li_extent_shared(b, batch, args->b_batch, li_checked(g->b_row, b_height), &g->b_batch[1]);
  c = li_extent(c, batch, args->c_batch, li_checked(g->c_row, args->m), &g->c_batch[1]);
  if (a < 0 || b < 0 || c < 0) return false;

  g->a = args->a;
  g->b = args->b;
  g->c = args->c;
  g->bias = args->bias;
  g->m = args->m;
  g->n = args->n;
  g->k = args->k;
  g->batch[0] = 1;
  g->batch[1] = batch;
  g->a_column = g->b_column = 1;
  if (args->transpose_a) {
    g->a_column = g->a_row;
    g->a_row = 1;
  }
  if (args->transpose_b) {
    g->b_column = g->b_row;
    g->b_row = 1;
  }
  g->alpha = args->scale == 0 ? 1.0f : args->scale;
  g->activation = (int)li_activation_or(args->activation, LI_NO_ACTIVATION);
  g->accumulate = args->accumulate;
  g->dots = g->m == 1 && args->transpose_b;
  return true;
}

LUNA_API size_t luna_gemm_scratch(const luna_gemm_args *args) {
  const li_kernels *kernels = args ? li_kernels_of(args->run.isa) : NULL;
  li_gemm g;
  if (!kernels || !li_gemm_of(args, &g)) return 0;
  return li_scratch_for(li_gemm_scratch(kernels, &g, li_parallel_of(&args->run).threads), 0);
}

LUNA_API luna_status luna_gemm_f32(const luna_gemm_args *args) {
  li_gemm g;
  if (!args || !li_gemm_of(args, &g)) return LUNA_BAD_ARGUMENT;
  const bool empty = g.m == 0 || g.n == 0;
  if (!empty && (!g.c || (g.k > 0 && (!g.a || !g.b)))) return LUNA_BAD_ARGUMENT;
  const li_kernels *kernels = li_kernels_of(args->run.isa);
  if (!kernels) return LUNA_UNSUPPORTED;
  if (empty) return LUNA_OK;

  if (g.k == 0) g.a = g.b = g.c; /* They may be null, and an offset from null is undefined. */
  li_parallel parallel = li_parallel_of(&args->run);
  void *scratch = li_scratch_of(&args->run, li_gemm_scratch(kernels, &g, parallel.threads), &kernels);
  li_run_gemm(kernels, &g, &parallel, scratch);
  return LUNA_OK;
}

/* --- Softmax attention --- */
/* Returns the rows of a ragged batch, or -1 if the offsets fall or start below 0. */
LI_FN int64_t li_ragged_rows(const int32_t *offsets, int64_t batch) {
  for (int64_t b = 0; b < batch; b++)
    if (offsets[b] < 0 || offsets[b + 1] < offsets[b]) return -1;
  if (batch > 0) return offsets[batch];
  return 0;
}
/* Finds the strides of [batch, rows, heads, dim] or, ragged, [rows, heads, dim]. Returns false if there are none. */
LI_FN bool li_heads_of(const int64_t size[4], bool ragged, bool shared, int64_t *batch, int64_t *row, int64_t *head) {
  int64_t extent = li_extent(size[3], size[2], *head, size[3], head);
  extent = li_extent(extent, size[1], *row, li_checked(size[2], size[3]), row);
  if (ragged) *batch = 0;
  else if (shared) extent = li_extent_shared(extent, size[0], *batch, li_checked(size[1], *row), batch);
  else extent = li_extent(extent, size[0], *batch, li_checked(size[1], *row), batch);
  return extent >= 0;
}
LI_FN bool li_lengths_fit(const int32_t *lengths, int64_t batch, int64_t most) {
  for (int64_t b = 0; lengths && b < batch; b++)
    if (lengths[b] < 0 || lengths[b] > most) return false;
  return true;
}

LI_FN bool li_attention_of(const luna_attention_args *args, li_attention *a) {
  const int64_t pairs = li_checked(args->batch, args->heads), d = args->head_dim;
  const int64_t dv = args->value_dim ? args->value_dim : d;
  const bool ragged = args->query_offsets != NULL;
  int64_t queries = args->queries, keys = args->keys;
  if (ragged) queries = li_ragged_rows(args->query_offsets, args->batch);
  if (ragged && args->key_offsets) keys = li_ragged_rows(args->key_offsets, args->batch);
  const int64_t q[4] = { args->batch, queries, args->heads, d }, k[4] = { args->batch, keys, args->heads, d };
  const int64_t v[4] = { args->batch, keys, args->heads, dv }, out[4] = { args->batch, queries, args->heads, dv };
  *a = *args;
  a->value_dim = dv;
  if (a->scale == 0) a->scale = (float)(1.0 / sqrt((double)d));
  if (pairs < 0 || a->heads < 1 || a->queries < 0 || a->keys < 0 || d < 1 || dv < 1) return false;
  if (li_max(d, dv) > LI_MAX_SCRATCH) return false;
  if (!(a->dropout >= 0 && a->dropout < 1) || !li_is_finite(a->scale)) return false;
  if (ragged != (a->key_offsets != NULL) || (ragged && a->lengths)) return false;
  if (!li_heads_of(q, ragged, true, &a->q_batch, &a->q_row, &a->q_head) ||
      !li_heads_of(k, ragged, true, &a->k_batch, &a->k_row, &a->k_head) ||
      !li_heads_of(v, ragged, true, &a->v_batch, &a->v_row, &a->v_head) ||
      !li_heads_of(out, ragged, false, &a->out_batch, &a->out_row, &a->out_head))
    return false;
  /* Dropout numbers the scores. */
  if (li_product(li_product(pairs, a->queries, INT64_MAX), a->keys, INT64_MAX) < 0) return false;
  if (!li_lengths_fit(a->lengths, a->batch, keys)) return false;
  if (a->grad_log_sum_exp && (ragged || a->sums || a->grad_sums)) return false;
  li_attention_band(a);
  return true;
}

LUNA_API size_t luna_softmax_attention_scratch(const luna_attention_args *args) {
  const li_kernels *kernels = args ? li_kernels_of(args->run.isa) : NULL;
  li_attention a;
  if (!kernels || !li_attention_of(args, &a)) return 0;
  const int64_t threads = li_parallel_of(&args->run).threads;
  return li_scratch_for(li_attention_scratch(kernels, &a, threads, false),
                        li_attention_scratch(kernels, &a, threads, true));
}

LI_FN luna_status li_attention_call(const luna_attention_args *args, bool backward) {
  li_attention a;
  if (!args || !li_attention_of(args, &a)) return LUNA_BAD_ARGUMENT;
  int64_t queries = a.queries, keys = a.keys;
  if (a.query_offsets) {
    queries = li_ragged_rows(a.query_offsets, a.batch);
    keys = li_ragged_rows(a.key_offsets, a.batch);
  } else if (a.batch == 0) {
    queries = 0;
  }
  if (queries > 0 && (!a.q || !a.out || (keys > 0 && (!a.k || !a.v)))) return LUNA_BAD_ARGUMENT;
  if (backward && queries > 0 && (!a.grad_out || !a.log_sum_exp || (a.grad_sums && !a.sums))) return LUNA_BAD_ARGUMENT;
  const li_kernels *kernels = li_kernels_of(args->run.isa);
  if (!kernels) return LUNA_UNSUPPORTED;
  if (queries == 0) return LUNA_OK;

  if (keys == 0) a.k = a.v = a.out;  /* As in luna_gemm_f32 */
  li_parallel parallel = li_parallel_of(&args->run);
  void *scratch = li_scratch_of(&args->run, li_attention_scratch(kernels, &a, parallel.threads, backward), &kernels);
  const luna_status status = li_reference_status(&args->run, kernels, backward);
  if (status != LUNA_OK) return status;
  if (LI_TRAINS && backward) li_run_attention_backward(kernels, &a, &parallel, scratch);
  else li_run_attention(kernels, &a, &parallel, scratch);
  return LUNA_OK;
}
LUNA_API luna_status luna_softmax_attention_f32(const luna_attention_args *args) {
  return li_attention_call(args, false);
}
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_softmax_attention_backward_f32(const luna_attention_args *args) {
  return li_attention_call(args, true);
}
#endif

/* --- Causal product --- */
LI_FN bool li_causal_fits(int64_t dim, int64_t value_dim) {
  return li_product(dim, value_dim, LI_MAX_SCRATCH) > 0;
}
LI_FN bool li_causal_of(const luna_causal_args *args, li_causal *c) {
  const int64_t xy[4] = { args->batch, args->rows, args->heads, args->dim };
  const int64_t z[4] = { args->batch, args->rows, args->heads, args->value_dim };
  *c = *args;
  return c->batch >= 0 && c->rows >= 0 && c->heads >= 1 && li_causal_fits(c->dim, c->value_dim) &&
         li_heads_of(xy, false, false, &c->xy_batch, &c->xy_row, &c->xy_head) &&
         li_heads_of(z, false, false, &c->z_batch, &c->z_row, &c->z_head);
}

LUNA_API size_t luna_causal_product_scratch(const luna_causal_args *args) {
  const li_kernels *kernels = args ? li_kernels_of(args->run.isa) : NULL;
  li_causal c;
  if (!kernels || !li_causal_of(args, &c)) return 0;
  const int64_t threads = li_parallel_of(&args->run).threads;
  return li_scratch_for(li_causal_scratch(kernels, &c, threads, false), li_causal_scratch(kernels, &c, threads, true));
}

LI_FN luna_status li_causal_call(const luna_causal_args *args, bool backward) {
  li_causal c;
  if (!args || !li_causal_of(args, &c)) return LUNA_BAD_ARGUMENT;
  const bool empty = c.batch == 0 || c.rows == 0;
  if (!empty && (!c.x || !c.y || !c.z || (backward ? !c.grad_out : !c.out))) return LUNA_BAD_ARGUMENT;
  const li_kernels *kernels = li_kernels_of(args->run.isa);
  if (!kernels) return LUNA_UNSUPPORTED;
  if (empty) return LUNA_OK;

  li_parallel parallel = li_parallel_of(&args->run);
  void *scratch = li_scratch_of(&args->run, li_causal_scratch(kernels, &c, parallel.threads, backward), &kernels);
  const luna_status status = li_reference_status(&args->run, kernels, backward);
  if (status != LUNA_OK) return status;
  if (LI_TRAINS && backward) li_run_causal_backward(kernels, &c, &parallel, scratch);
  else li_run_causal(kernels, &c, &parallel, scratch);
  return LUNA_OK;
}
LUNA_API luna_status luna_causal_product_f32(const luna_causal_args *args) { return li_causal_call(args, false); }
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_causal_product_backward_f32(const luna_causal_args *args) {
  return li_causal_call(args, true);
}
#endif

/* --- Causal Luna attention --- */
LI_FN bool li_causal_nested_of(const luna_causal_nested_args *args, li_causal_luna *a) {
  const int64_t rows = li_checked(li_checked(args->batch, args->heads), args->rows);
  *a = *args;
  if (a->scale == 0) a->scale = (float)(1.0 / sqrt((double)a->head_dim));
  if (a->omega == LUNA_ACTIVATION_DEFAULT) a->omega = LUNA_ACTIVATION_SOFTPLUS2;
  if (a->heads < 1 || a->rows < 0 || !li_causal_fits(a->head_dim, a->slots) || li_checked(rows, a->head_dim) < 0 ||
      li_checked(rows, a->slots) < 0 || a->horizon < 0 || !li_is_finite(a->scale) || a->position < 0 ||
      !li_is_omega((int)a->omega)) return false;
  if (!li_lengths_fit(a->lengths, a->batch, a->slots)) return false;
  if (a->routed && !a->forget) return false;
  if (a->forget) a->horizon = 0;
  else a->grad_forget = NULL;
  if (a->state) a->kept = NULL;
  else a->position = 0;
  return true;
}
LUNA_API size_t luna_causal_nested_attention_scratch(const luna_causal_nested_args *args) {
  const li_kernels *kernels = args ? li_kernels_of(args->run.isa) : NULL;
  li_causal_luna a;
  if (!kernels || !li_causal_nested_of(args, &a)) return 0;
  const int64_t threads = li_parallel_of(&args->run).threads;
  const size_t backward = a.state ? 0 : li_causal_luna_scratch(kernels, &a, threads, true);
  return li_scratch_for(li_causal_luna_scratch(kernels, &a, threads, false), backward);
}

LI_FN luna_status li_causal_nested_call(const luna_causal_nested_args *args, bool backward) {
  li_causal_luna a;
  double small[900];
  if (!args || !li_causal_nested_of(args, &a)) return LUNA_BAD_ARGUMENT;
  const bool empty = a.batch == 0 || a.rows == 0, lacks = backward ? !a.grad_out || !a.kept : !a.out;
  if (!empty && (!a.q || !a.k || !a.v || !a.s || lacks)) return LUNA_BAD_ARGUMENT;
  const li_kernels *kernels = li_kernels_of(args->run.isa);
  if (!kernels) return LUNA_UNSUPPORTED;
  if (empty) return LUNA_OK;

  li_parallel parallel = li_parallel_of(&args->run);
  void *scratch = li_scratch_of(&args->run, li_causal_luna_scratch(kernels, &a, parallel.threads, backward), &kernels);
  const luna_status status = li_reference_status(&args->run, kernels, backward);
  if (status != LUNA_OK) return status;
  if (!scratch) {
    if (li_causal_luna_scratch(kernels, &a, 1, backward) > sizeof small) return LUNA_OUT_OF_MEMORY;
    scratch = small;
  }
  if (LI_TRAINS && backward) li_run_causal_luna_backward(kernels, &a, &parallel, scratch);
  else li_run_causal_luna(kernels, &a, &parallel, scratch);
  return LUNA_OK;
}
LUNA_API luna_status luna_causal_nested_attention_f32(const luna_causal_nested_args *args) {
  return li_causal_nested_call(args, false);
}
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_causal_nested_attention_backward_f32(const luna_causal_nested_args *args) {
  return li_causal_nested_call(args, true);
}
#endif

/* ----------------
   >>safetensors: reading files of tensors, without allocation or stdio
   A file has three parts: 8 bytes with the header's size, little-endian; the header, {"__metadata__": {"key": "value",
   ...}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} and spaces; and the data, which the
   tensors cover without holes. li_st_open validates untrusted bytes once. The functions that use its li_st walk the
   same header and stay inside it. li_st_index, given memory, sorts names and keys, so that each is found in log n and a
   hostile header costs n log n. A new dtype is a row of LI_ST_FORMATS. Guarded by tests/files/safetensors.c.
   ---------------- */
#define LI_ST_RANK 8            /* Maximal dimensions */
#define LI_ST_NAME 1032         /* Parameter's name and ".scale" */
#define LI_ST_HEADER 100000000u /* The format's own limit */
#define LI_ST_BAD 0xFFFFFFFFu   /* No character */

typedef struct li_st {
  const uint8_t *data;
  const char *header;
  size_t data_size, header_size;
  size_t meta;            /* __metadata__'s offset, or 0 */
  size_t tensors, pairs;
  bool contiguous;        /* Each tensor's data begins where the previous one ends. */
  uint64_t *names, *keys; /* The index holds where each opens in the header, sorted by text. */
} li_st;

/* This is the text between the quotes of a JSON string. Its escapes are not decoded. */
typedef struct li_st_text { const char *at; size_t size; } li_st_text;

/* The columns are the name, the bytes of an element, and the bits of the exponent, or 0 if it is not a real number. */
#define LI_ST_FORMATS(F) \
  F(BOOL, 1, 0) F(U8, 1, 0) F(I8, 1, 0) F(F8_E4M3, 1, 0) F(F8_E5M2, 1, 0) F(I16, 2, 0) F(U16, 2, 0) F(F16, 2, 5) \
  F(BF16, 2, 8) F(I32, 4, 0) F(U32, 4, 0) F(F32, 4, 8) F(F64, 8, 11) F(I64, 8, 0) F(U64, 8, 0)
#define LI_ST_DTYPE(name, size, exponent) LI_ST_##name,
typedef enum li_st_dtype { LI_ST_FORMATS(LI_ST_DTYPE) LI_ST_DTYPES } li_st_dtype;
#define LI_ST_FORMAT(name, size, exponent) { #name, size, exponent },
typedef struct li_st_format { const char *name; int size, exponent; } li_st_format;
static LI_UNUSED const li_st_format li_st_formats[] = { LI_ST_FORMATS(LI_ST_FORMAT) };

typedef struct li_st_tensor {
  li_st_text name;
  int dtype;            /* li_st_dtype */
  int rank;
  int64_t shape[LI_ST_RANK];
  int64_t count;
  const uint8_t *data;  /* At any alignment */
  size_t bytes;
  const uint8_t *scale; /* I8 rows have F32 [shape[0]], by li_st_value; or null. */
  int64_t first;        /* Data begins at this element of a whole. */
} li_st_tensor;

LI_FN bool li_st_is_real(const li_st_tensor *t) {
  return li_st_formats[t->dtype].exponent > 0 || t->scale;
}

/* --- Text: UTF-8 and the escapes of JSON --- */
static LI_UNUSED const char li_hex_digits[] = "0123456789abcdefABCDEF";

/* Returns the UTF-8 character at *at and moves *at past it. Returns LI_ST_BAD if it is cut short, overlong or
   invalid. */
LI_FN uint32_t li_st_utf8(const char **at, const char *end) {
  static const uint32_t min[4] = { 0, 0x80, 0x800, 0x10000 };
  const uint8_t *s = (const uint8_t *)*at;
  if (s[0] < 0x80) {
    ++*at;
    return s[0];
  }

  const int more = (s[0] >= 0xC0) + (s[0] >= 0xE0) + (s[0] >= 0xF0);
  uint32_t code = s[0] & 0x3Fu >> more;
  if (more == 0 || s[0] > 0xF4 || end - *at <= more) return LI_ST_BAD;
  for (int i = 1; i <= more; i++) {
    if ((s[i] & 0xC0) != 0x80) return LI_ST_BAD;
    code = code << 6 | (s[i] & 0x3Fu);
  }
  if (code < min[more] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return LI_ST_BAD;
  *at += more + 1;
  return code;
}

LI_FN size_t li_st_encode(uint32_t code, char out[4]) {
  const size_t n = (size_t)1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);
  const uint32_t mark = n > 1 ? (0xF00u >> n) & 0xFF : 0;
  for (size_t i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
  out[0] = (char)(mark | code);
  return n;
}

LI_FN uint32_t li_st_hex(const char *at, const char *end) {
  uint32_t value = 0;
  if (end - at < 4) return LI_ST_BAD;
  for (int i = 0; i < 4; i++) {
    const char *digit = (const char *)memchr(li_hex_digits, at[i], 22);
    if (!digit) return LI_ST_BAD;
    value = value << 4 | (uint32_t)(digit - li_hex_digits - (*digit >= 'A' && *digit <= 'F') * 6);
  }
  return value;
}

/* Returns the character of a JSON string at *at and moves *at past it. Returns LI_ST_BAD if there is none. */
LI_FN uint32_t li_st_character(const char **at, const char *end) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  const char *s = *at;
  if (s == end || (uint8_t)*s < 0x20) return LI_ST_BAD;
  if (*s != '\\') return li_st_utf8(at, end);
  if (end - s < 2) return LI_ST_BAD;
  if (s[1] != 'u') {
    const char *letter = (const char *)memchr(letters, s[1], sizeof(letters) - 1);
    if (!letter) return LI_ST_BAD;
    *at += 2;
    return (uint32_t)meanings[letter - letters];
  }

  const uint32_t code = li_st_hex(s + 2, end);
  if (code == LI_ST_BAD) return LI_ST_BAD;
  *at += 6;
  if (code < 0xD800 || code > 0xDFFF) return code;

  if (code > 0xDBFF || end - s < 12 || s[6] != '\\' || s[7] != 'u') return LI_ST_BAD;
  const uint32_t low = li_st_hex(s + 8, end);
  if (low < 0xDC00 || low > 0xDFFF) return LI_ST_BAD;
  *at += 6;
  return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
}

/* Compares two strings by decoded characters. p is JSON, up to its closing quote or `end`; q is JSON too, or UTF-8 with
   a 0 after it. */
LI_FN int li_st_order(const char *p, const char *end, const char *q, bool json) {
  for (;;) {
    for (; p < end && *p == *q && *p != '"' && *p != '\\' && (int8_t)*p > 0; p++) q++; /* ASCII is itself */
    const bool p_ends = p == end || *p == '"', q_ends = *q == (json ? '"' : 0);
    if (p_ends || q_ends) return q_ends - p_ends;
    const uint32_t c = li_st_character(&p, end);
    const uint32_t d = json ? li_st_character(&q, end) : li_st_utf8(&q, q + 4); /* Stops at the 0 */
    if (c != d || c == LI_ST_BAD) return c < d ? -1 : 1;
  }
}
LI_FN bool li_st_equal(li_st_text text, const char *string) {
  return li_st_order(text.at, text.at + text.size, string, false) == 0;
}

/* Writes the decoded text as UTF-8 with a 0 after it, cut at a whole character to fit in `room` bytes. Returns its full
   size without the 0; the text was cut unless that is below room. */
LI_FN size_t li_st_decode(li_st_text text, char *out, size_t room) {
  const char *at = text.at, *end = text.at + text.size;
  char utf8[4];
  size_t size = 0, last = 0;
  while (at < end) {
    const uint32_t code = li_st_character(&at, end);
    if (code == LI_ST_BAD) break;
    const size_t n = li_st_encode(code, utf8);
    if (size + n < room) {
      memcpy(out + size, utf8, n);
      last = size + n;
    }
    size += n;
  }
  if (room > 0) out[last] = 0;
  return size;
}

/* Compares two items of an index by their texts or, without st, two numbers. */
LI_FN int li_st_compare(const li_st *st, uint64_t a, uint64_t b) {
  if (!st) return (a > b) - (a < b);
  return li_st_order(st->header + (size_t)a + 1, st->header + st->header_size, st->header + (size_t)b + 1, true);
}

/* --- JSON: headers nest three deep, and other keys and values are rejected, so that nothing recurses --- */
typedef struct li_st_json {
  const char *at, *end;
  const char *wrong; /* First error, or null */
  const char *meta; /* Where __metadata__ starts */
  size_t pairs;     /* In __metadata__ */
  bool first;       /* An object's first member is next. */
} li_st_json;

LI_FN bool li_st_fail(li_st_json *j, const char *wrong) {
  if (!j->wrong) j->wrong = wrong;
  return false;
}
LI_FN bool li_st_next_is(li_st_json *j, char c) {
  while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
  return j->at < j->end && *j->at == c;
}
LI_FN bool li_st_skip(li_st_json *j, char c) {
  if (!li_st_next_is(j, c)) return false;
  j->at++;
  return true;
}
LI_FN bool li_st_take(li_st_json *j, char c) {
  return li_st_skip(j, c) || li_st_fail(j, "the header is not the JSON of a safetensors file");
}

LI_FN bool li_st_string(li_st_json *j, li_st_text *text) {
  if (!li_st_take(j, '"')) return false;
  text->at = j->at;
  while (j->at < j->end && *j->at != '"')
    if (li_st_character(&j->at, j->end) == LI_ST_BAD)
      return li_st_fail(j, "a string has a control character, a bad escape or invalid UTF-8");
  text->size = (size_t)(j->at - text->at);
  return li_st_take(j, '"');
}

/* Reads a list of at most `max` integers. Returns how many there are, or -1. */
LI_FN int li_st_list(li_st_json *j, int64_t *out, int max) {
  int count = 0;
  if (!li_st_take(j, '[')) return -1;
  if (li_st_skip(j, ']')) return 0;
  do {
    const bool zero = li_st_next_is(j, '0');
    const char *start = j->at;
    int64_t value = 0;
    for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
      const int digit = *j->at - '0';
      if (value > (INT64_MAX - digit) / 10) {
        li_st_fail(j, "a number is too large");
        return -1;
      }
      value = value * 10 + digit;
    }
    if (j->at == start || (zero && j->at - start > 1))
      li_st_fail(j, "a shape or data_offsets has something other than whole numbers");
    else if (count == max)
      li_st_fail(j, "a shape has more than 8 dimensions, or data_offsets more than two numbers");
    if (j->wrong) return -1;
    out[count++] = value;
  } while (li_st_skip(j, ','));
  if (!li_st_take(j, ']')) return -1;
  return count;
}

LI_FN bool li_st_key(li_st_json *j, li_st_text *key) {
  return li_st_string(j, key) && li_st_take(j, ':');
}
/* Reads the key and the colon of an object's next member. Returns false at the object's end or if something is
   wrong. */
LI_FN bool li_st_member(li_st_json *j, li_st_text *key) {
  const bool first = j->first;
  j->first = false;
  if (first && !li_st_take(j, '{')) return false;
  if (li_st_skip(j, '}')) return false;
  return (first || li_st_take(j, ',')) && li_st_key(j, key);
}

LI_FN bool li_st_metadata(li_st_json *j) {
  li_st_text key, value;
  if (j->meta) return li_st_fail(j, "there is more than one __metadata__");
  if (!li_st_next_is(j, '{')) return li_st_fail(j, "__metadata__ is not an object");
  j->meta = j->at;
  for (j->first = true; li_st_member(j, &key); j->pairs++) {
    if (!li_st_next_is(j, '"')) return li_st_fail(j, "__metadata__ holds something other than strings");
    if (!li_st_string(j, &value)) return false;
  }
  return !j->wrong;
}

/* Returns the elements of a shape, or -1 if they are too many or a size is negative. */
LI_FN int64_t li_st_count(int rank, const int64_t *shape) {
  int64_t count = 1;
  for (int i = 0; i < rank && count >= 0; i++) count = li_checked(count, shape[i]);
  return count;
}

/* Reads {"dtype": ..., "shape": ..., "data_offsets": ...}, in any order, each once. */
LI_FN bool li_st_entry(const li_st *st, li_st_json *j, li_st_tensor *t) {
  int64_t offsets[2] = { 0, 0 };
  li_st_text key, dtype;
  int seen = 0, part;
  t->scale = NULL;
  t->first = 0;
  for (j->first = true; li_st_member(j, &key); seen |= part) {
    if (li_st_equal(key, "dtype")) {
      part = 1;
      if (!li_st_string(j, &dtype)) return false;
      t->dtype = 0;
      while (t->dtype < LI_ST_DTYPES && !li_st_equal(dtype, li_st_formats[t->dtype].name)) t->dtype++;
      if (t->dtype == LI_ST_DTYPES) return li_st_fail(j, "a tensor has an unknown dtype");
    } else if (li_st_equal(key, "shape")) {
      part = 2;
      t->rank = li_st_list(j, t->shape, LI_ST_RANK);
      if (t->rank < 0) return false;
    } else if (li_st_equal(key, "data_offsets")) {
      part = 4;
      if (li_st_list(j, offsets, 2) != 2) return li_st_fail(j, "data_offsets is not two numbers");
    } else {
      return li_st_fail(j, "a tensor has a key other than dtype, shape and data_offsets");
    }
    if (seen & part) return li_st_fail(j, "a tensor has the same key twice");
  }
  if (j->wrong) return false;
  if (seen != 7) return li_st_fail(j, "a tensor lacks dtype, shape or data_offsets");

  t->count = li_st_count(t->rank, t->shape);
  if (t->count < 0) return li_st_fail(j, "a tensor's shape is too large");
  if (offsets[0] > offsets[1]) return li_st_fail(j, "a tensor ends before it begins");
  if ((uint64_t)offsets[1] > st->data_size)
    return li_st_fail(j, "a tensor lies beyond the end of the file: it was cut short, copy it again");
  if ((size_t)(offsets[1] - offsets[0]) != (size_t)t->count * (size_t)li_st_formats[t->dtype].size)
    return li_st_fail(j, "a tensor's data_offsets do not fit its dtype and shape");
  t->data = st->data + (size_t)offsets[0];
  t->bytes = (size_t)(offsets[1] - offsets[0]);
  return true;
}

LI_FN bool li_st_read(const li_st *st, li_st_json *j, li_st_tensor *out) {
  while (li_st_member(j, &out->name)) {
    if (!li_st_equal(out->name, "__metadata__")) return li_st_entry(st, j, out);
    if (!li_st_metadata(j)) return false;
  }
  return false;
}

LI_FN li_st_json li_st_json_at(const li_st *st, size_t offset) {
  const li_st_json j = { st->header + offset, st->header + st->header_size, NULL, NULL, 0, offset == 0 };
  return j;
}

/* --- Tensors and pairs: by a cursor, which starts at 0, or by name --- */
LI_FN bool li_st_next(const li_st *st, size_t *cursor, li_st_tensor *out) {
  li_st_json j = li_st_json_at(st, *cursor);
  if (!li_st_read(st, &j, out)) return false;
  *cursor = (size_t)(j.at - st->header);
  return true;
}

/* Finds a name in sorted items and sets the reader to where it opens. Returns false if it is absent. */
LI_FN bool li_st_look(const li_st *st, const uint64_t *items, size_t count, const char *name, li_st_json *j) {
  size_t low = 0, high = count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    *j = li_st_json_at(st, (size_t)items[middle]);
    const int order = li_st_order(j->at + 1, j->end, name, false);
    if (order == 0) return true;
    if (order < 0) low = middle + 1;
    else high = middle;
  }
  return false;
}

LI_FN bool li_st_find(const li_st *st, const char *name, li_st_tensor *out) {
  li_st_json j;
  size_t cursor = 0;
  if (st->names)
    return li_st_look(st, st->names, st->tensors, name, &j) && li_st_key(&j, &out->name) && li_st_entry(st, &j, out);
  while (li_st_next(st, &cursor, out))
    if (li_st_equal(out->name, name)) return true;
  return false;
}

/* Finds a tensor and, if it is an I8 matrix, its scales: the tensor NAME.scale, F32 [rows]. */
LI_FN bool li_st_value(const li_st *st, const char *name, li_st_tensor *out) {
  static const char end[] = ".scale";
  char text[LI_ST_NAME];
  li_st_tensor scale;
  const size_t size = strlen(name);
  if (!li_st_find(st, name, out)) return false;
  if (out->dtype != LI_ST_I8 || out->rank != 2 || size + sizeof end > sizeof text) return true;

  memcpy(text, name, size);
  memcpy(text + size, end, sizeof end);
  if (li_st_find(st, text, &scale) && scale.dtype == LI_ST_F32 && scale.rank == 1 &&
      scale.shape[0] == out->shape[0]) out->scale = scale.data;
  return true;
}

LI_FN bool li_st_meta_next(const li_st *st, size_t *cursor, li_st_text *key, li_st_text *value) {
  li_st_json j = li_st_json_at(st, *cursor ? *cursor : st->meta);
  j.first = *cursor == 0;
  if (st->meta == 0 || !li_st_member(&j, key) || !li_st_string(&j, value)) return false;
  *cursor = (size_t)(j.at - st->header);
  return true;
}

LI_FN bool li_st_meta(const li_st *st, const char *key, li_st_text *value) {
  li_st_text name;
  li_st_json j;
  size_t cursor = 0;
  if (st->keys)
    return li_st_look(st, st->keys, st->pairs, key, &j) && li_st_key(&j, &name) && li_st_string(&j, value);
  while (li_st_meta_next(st, &cursor, &name, value))
    if (li_st_equal(name, key)) return true;
  return false;
}

/* --- The index --- */
/* Heapsort works in place and takes n log n for any input. */
LI_FN void li_st_sort(const li_st *st, uint64_t *items, size_t count) {
  size_t start = count / 2, end = count, root, child;
  uint64_t item;
  while (end > 1) {
    if (start > 0) item = items[--start];
    else {
      item = items[--end];
      items[end] = items[0];
    }
    for (root = start; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end && li_st_compare(st, items[child], items[child + 1]) < 0) child++;
      if (li_st_compare(st, item, items[child]) >= 0) break;
      items[root] = items[child];
    }
    items[root] = item;
  }
}

/* Returns whether tensors whose sizes add up to the data's size cover it without overlap. They do if the beginnings are
   distinct and every end is a beginning or the data's end: then no tensor ends before the next begins and, because of
   the sum, none ends after it. */
LI_FN bool li_st_covers(const li_st *st, uint64_t *begins) {
  li_st_tensor t;
  size_t cursor = 0, count = 0;
  while (li_st_next(st, &cursor, &t))
    if (t.bytes > 0) begins[count++] = (uint64_t)(t.data - st->data);
  li_st_sort(NULL, begins, count);
  for (size_t i = 0; i < count; i++)
    if (i == 0 ? begins[i] != 0 : begins[i] == begins[i - 1]) return false;
  for (cursor = 0; li_st_next(st, &cursor, &t);) {
    const uint64_t end = (uint64_t)(t.data - st->data) + t.bytes;
    size_t low = 0, high = count;
    while (low < high) {
      const size_t middle = low + (high - low) / 2;
      if (begins[middle] < end) low = middle + 1;
      else high = middle;
    }
    if (t.bytes > 0 && end != st->data_size && (low == count || begins[low] != end)) return false;
  }
  return true;
}

/* Sorts items, and returns whether they are unique. */
LI_FN bool li_st_unique(const li_st *st, uint64_t *items, size_t count) {
  li_st_sort(st, items, count);
  for (size_t i = 1; i < count; i++)
    if (li_st_compare(st, items[i - 1], items[i]) == 0) return false;
  return true;
}

/* Makes the index in names [tensors] and keys [pairs]. If keys is null, pairs are looked up by walking, and the first
   of two equal keys counts. Tensors without data may lie anywhere. Returns what li_st_open returns. */
LI_FN const char *li_st_index(li_st *st, uint64_t *names, uint64_t *keys) {
  li_st_tensor t;
  li_st_text key, value;
  if (!st->contiguous && !li_st_covers(st, names)) return "two tensors overlap";
  for (size_t cursor = 0, i = 0; li_st_next(st, &cursor, &t); i++) names[i] = (uint64_t)(t.name.at - 1 - st->header);
  if (!li_st_unique(st, names, st->tensors)) return "two tensors have the same name";
  st->names = names;
  if (!keys) return NULL;
  for (size_t cursor = 0, i = 0; li_st_meta_next(st, &cursor, &key, &value); i++)
    keys[i] = (uint64_t)(key.at - 1 - st->header);
  if (!li_st_unique(st, keys, st->pairs)) return "two keys of __metadata__ are the same";
  st->keys = keys;
  return NULL;
}

/* Opens a file in memory, which must outlive st. Returns null, or a sentence that says what is wrong. Only li_st_index
   can say whether names are unique and data overlap. */
LI_FN const char *li_st_open(li_st *st, const void *bytes, size_t size) {
  li_st_tensor t;
  uint64_t header_size = 0;
  size_t covered = 0;
  memset(st, 0, sizeof(*st));
  if (size < 8) return "the file is shorter than 8 bytes";
  for (int i = 7; i >= 0; i--) header_size = header_size << 8 | ((const uint8_t *)bytes)[i];
  if (header_size == 0 || (size > 8 && ((const char *)bytes)[8] != '{'))
    return "it does not begin as safetensors files do";
  if (header_size > LI_ST_HEADER) return "the header is longer than 100 MB";
  if (header_size > size - 8) return "the file ends inside its header";
  st->header = (const char *)bytes + 8;
  st->header_size = (size_t)header_size;
  st->data = (const uint8_t *)bytes + 8 + st->header_size;
  st->data_size = size - 8 - st->header_size;

  li_st_json j = li_st_json_at(st, 0);
  for (st->contiguous = true; li_st_read(st, &j, &t); st->tensors++) {
    if (t.bytes > st->data_size - covered) return "two tensors overlap";
    st->contiguous = st->contiguous && (t.bytes == 0 || t.data == st->data + covered);
    covered += t.bytes;
  }
  if (j.wrong) return j.wrong;
  for (; j.at < j.end; j.at++)
    if (*j.at != ' ') return "something other than spaces follows the header's JSON";
  if (covered != st->data_size) return "the tensors do not cover the file's data";
  if (j.meta) st->meta = (size_t)(j.meta - st->header);
  st->pairs = j.pairs;
  return NULL;
}

/* --- Numbers: byte by byte, so that neither the machine's byte order nor alignment matters --- */
LI_FN bool li_st_little(void) {
  const uint16_t one = 1;
  return *(const uint8_t *)&one == 1;
}

/* Returns the value of a bit pattern with these sizes of exponent and mantissa. */
LI_FN double li_st_real(uint64_t bits, int exponent_bits, int mantissa_bits) {
  const int max = (1 << exponent_bits) - 1, exponent = (int)(bits >> mantissa_bits) & max;
  const uint64_t one = (uint64_t)1 << mantissa_bits, mantissa = bits & (one - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  const int shift = -(max / 2) - mantissa_bits;
  if (exponent == max && mantissa) return (double)NAN;
  if (exponent == max) return sign * (double)INFINITY;
  if (exponent == 0) return sign * ldexp((double)mantissa, 1 + shift);
  return sign * ldexp((double)(mantissa + one), exponent + shift);
}

/* Returns the tensor's data in place if this machine can read it as float, else null. */
LI_FN const float *li_st_borrow(const li_st_tensor *t) {
  const bool fits = t->dtype == LI_ST_F32 && li_st_little() && (uintptr_t)t->data % sizeof(float) == 0;
  if (fits) return (const float *)(const void *)t->data;
  return NULL;
}

LI_FN float li_st_float(const uint8_t *at) {
  return li_float_of((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}

/* Writes a tensor's elements as float. Returns false unless its dtype is F32, F16, BF16, F64, or I8 with scales. */
LI_FN bool li_st_floats(const li_st_tensor *t, float *out) {
  const int size = li_st_formats[t->dtype].size, exponent = li_st_formats[t->dtype].exponent;
  if (t->scale) {
    for (int64_t i = 0; i < t->count; i++) {
      const int value = t->data[i] - (t->data[i] & 128) * 2;
      out[i] = (float)value * li_st_float(t->scale + 4 * ((t->first + i) / t->shape[1]));
    }
    return true;
  }

  if (t->dtype == LI_ST_F32 && li_st_little()) {
    li_copy(out, t->data, t->bytes);
    return true;
  }
  if (exponent == 0) return false;

  for (int64_t i = 0; i < t->count; i++) {
    const uint8_t *at = t->data + (size_t)i * (size_t)size;
    uint64_t bits = 0;
    for (int k = size - 1; k >= 0; k--) bits = bits << 8 | at[k];
    if (exponent == 8) { /* It is a float or the upper half of one. NaNs stay as they are. */
      const uint32_t pattern = (uint32_t)(bits << (32 - 8 * size));
      memcpy(&out[i], &pattern, sizeof(pattern));
    } else {
      out[i] = (float)li_st_real(bits, exponent, 8 * size - 1 - exponent);
    }
  }
  return true;
}

/* ----------------
   >>threads: a pool that hands work over in microseconds: its threads spin, then sleep
   The pool has at most one thread per core; further shares wait for a free one. First come the system's threads, locks
   and atomics, then li_pool. A port to another system adds a block with the same names. Guarded by
   tests/engine/threads.c.
   ---------------- */
#ifdef _WIN32 /* Threads, the clock, files */
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#endif
#if defined(LUNA_NO_THREADS) || !(defined(__GNUC__) || defined(__clang__) || defined(LI_MSVC)) || \
    (!defined(_WIN32) && !defined(__unix__) && !defined(__APPLE__)) || \
    (UINTPTR_MAX < UINT64_MAX && !defined(_WIN32) && !defined(__GCC_HAVE_SYNC_COMPARE_AND_SWAP_8))
#define LI_NO_POOL /* Also without atomic operations of 8 bytes, as on ARMv6 */
#elif defined(_WIN32)
typedef HANDLE li_thread;
typedef CRITICAL_SECTION li_mutex;
typedef CONDITION_VARIABLE li_condition;
#define li_mutex_open InitializeCriticalSection
#define li_mutex_close DeleteCriticalSection
#define li_mutex_lock EnterCriticalSection
#define li_mutex_unlock LeaveCriticalSection
#define li_condition_open InitializeConditionVariable
#define li_condition_wake WakeAllConditionVariable
#define LI_THREAD_MAIN DWORD WINAPI
LI_FN void li_condition_close(li_condition *c) { (void)c; }
LI_FN void li_condition_wait(li_condition *c, li_mutex *m) { SleepConditionVariableCS(c, m, INFINITE); }
LI_FN bool li_thread_start(li_thread *t, LPTHREAD_START_ROUTINE main, void *user) {
  *t = CreateThread(NULL, 0, main, user, 0, NULL);
  return *t != NULL;
}
LI_FN void li_thread_join(li_thread t) {
  WaitForSingleObject(t, INFINITE);
  CloseHandle(t);
}
LI_FN int64_t li_process(void) { return 0; } /* Nothing forks */
#else
#include <pthread.h>
#include <unistd.h>
typedef pthread_t li_thread;
typedef pthread_mutex_t li_mutex;
typedef pthread_cond_t li_condition;
#define li_mutex_close pthread_mutex_destroy
#define li_mutex_lock pthread_mutex_lock
#define li_mutex_unlock pthread_mutex_unlock
#define li_condition_close pthread_cond_destroy
#define li_condition_wait pthread_cond_wait
#define li_condition_wake pthread_cond_broadcast
#define LI_THREAD_MAIN void *
LI_FN void li_mutex_open(li_mutex *m) { pthread_mutex_init(m, NULL); }
LI_FN void li_condition_open(li_condition *c) { pthread_cond_init(c, NULL); }
LI_FN bool li_thread_start(li_thread *t, void *(*main)(void *), void *user) {
  return pthread_create(t, NULL, main, user) == 0;
}
LI_FN void li_thread_join(li_thread t) { pthread_join(t, NULL); }
LI_FN int64_t li_process(void) { return (int64_t)getpid(); }
#endif

#ifdef LI_NO_POOL
LI_FN int li_cores(void) { return 1; }
#else
/* A thread makes this many pauses (40 to 140 cycles each on x86) before it sleeps: longer than an op on one thread.
   A thread that is woken often is put on the caller's core, which costs a step its second core for tens of ms. */
#define LI_SPINS 10000

typedef struct li_pool {
  int64_t workers;   /* Besides the caller */
  li_thread *thread; /* The workers' */
  void (*task)(void *work, int64_t index);
  void *work;
  /* Atomic: the call's number in the high half, the next index in the low half. A thread that is late finds nothing
     left. */
  uint64_t ticket;
  uint64_t count;    /* Atomic */
  uint64_t done;     /* Atomic */
  uint64_t sleepers; /* Atomic: workers that wait */
  uint64_t waits;    /* Atomic: the caller waits */
  uint64_t stop;     /* Atomic */
  int64_t process;   /* It is the workers'. A child of fork has the pool's memory but not its threads. */
  li_mutex mutex;
  li_condition wake, finished;
} li_pool;

LI_INLINE void li_pause(void) {
#if defined(LI_MSVC)
  YieldProcessor();
#elif defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

#ifdef LI_MSVC
LI_INLINE uint64_t li_atomic_load(uint64_t *at) {
  const uint64_t v = *(volatile uint64_t *)at;
  MemoryBarrier();
  return v;
}
LI_INLINE void li_atomic_store(uint64_t *at, uint64_t v) { InterlockedExchange64((LONG64 *)at, (LONG64)v); }
LI_INLINE uint64_t li_atomic_add(uint64_t *at, uint64_t n) {
  return (uint64_t)InterlockedExchangeAdd64((LONG64 *)at, (LONG64)n) + n;
}
LI_INLINE bool li_atomic_cas(uint64_t *at, uint64_t *expected, uint64_t v) {
  const uint64_t was = (uint64_t)InterlockedCompareExchange64((LONG64 *)at, (LONG64)v, (LONG64)*expected);
  const bool same = was == *expected;
  *expected = was;
  return same;
}
#else
LI_INLINE uint64_t li_atomic_load(uint64_t *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
LI_INLINE void li_atomic_store(uint64_t *at, uint64_t v) { __atomic_store_n(at, v, __ATOMIC_SEQ_CST); }
LI_INLINE uint64_t li_atomic_add(uint64_t *at, uint64_t n) { return __atomic_add_fetch(at, n, __ATOMIC_SEQ_CST); }
LI_INLINE bool li_atomic_cas(uint64_t *at, uint64_t *expected, uint64_t v) {
  return __atomic_compare_exchange_n(at, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
#endif

LI_FN int li_cores(void) {
#ifdef _WIN32
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return (int)info.dwNumberOfProcessors;
#else
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return (int)li_max(1, li_min(cores, LI_MAX_THREADS));
#endif
}

LI_INLINE uint32_t li_pool_call(li_pool *pool) { return (uint32_t)(li_atomic_load(&pool->ticket) >> 32); }
LI_HOT void li_pool_wake(li_pool *pool, li_condition *condition) {
  li_mutex_lock(&pool->mutex);
  li_condition_wake(condition);
  li_mutex_unlock(&pool->mutex);
}

/* Runs a call's remaining indices. Task and work do not change until all indices that were taken are done. */
LI_HOT void li_pool_work(li_pool *pool, uint32_t call) {
  uint64_t ticket = li_atomic_load(&pool->ticket);
  while (ticket >> 32 == call && (uint32_t)ticket < li_atomic_load(&pool->count)) {
    if (!li_atomic_cas(&pool->ticket, &ticket, ticket + 1)) continue;
    pool->task(pool->work, (int64_t)(uint32_t)ticket);
    if (li_atomic_add(&pool->done, 1) == li_atomic_load(&pool->count) && li_atomic_load(&pool->waits))
      li_pool_wake(pool, &pool->finished);
    ticket++;
  }
}

static LI_THREAD_MAIN li_worker_main(void *user) {
  li_pool *pool = (li_pool *)user;
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    for (; li_pool_call(pool) == seen && spins < LI_SPINS; spins++) li_pause();
    if (spins == LI_SPINS) {
      li_mutex_lock(&pool->mutex);
      li_atomic_add(&pool->sleepers, 1);
      while (li_pool_call(pool) == seen) li_condition_wait(&pool->wake, &pool->mutex);
      li_atomic_add(&pool->sleepers, UINT64_MAX);
      li_mutex_unlock(&pool->mutex);
    }
    seen = li_pool_call(pool);
    if (li_atomic_load(&pool->stop)) return 0;
    li_pool_work(pool, seen);
  }
}

/* Returns false in a child of fork, which has no workers, and where mutex and condition may be in any state. This is
   asked only to wake sleepers or join threads, because a call's own thread runs every share that no other takes. */
LI_HOT bool li_pool_has_workers(const li_pool *pool) { return pool->process == li_process(); }

/* Begins a call of `count` tasks and returns its number. */
LI_HOT uint32_t li_pool_publish(li_pool *pool, int64_t count) {
  const uint32_t call = li_pool_call(pool) + 2;
  li_atomic_store(&pool->done, 0);
  /* So no thread pairs the new count with the old call. */
  li_atomic_store(&pool->ticket, (uint64_t)(call - 1) << 32 | UINT32_MAX);
  li_atomic_store(&pool->count, (uint64_t)count);
  li_atomic_store(&pool->ticket, (uint64_t)call << 32);
  if (li_atomic_load(&pool->sleepers) > 0 && li_pool_has_workers(pool)) li_pool_wake(pool, &pool->wake);
  return call;
}

LI_HOT void li_pool_run(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  li_pool *pool = (li_pool *)user;
  pool->task = task;
  pool->work = work;
  li_pool_work(pool, li_pool_publish(pool, count));
  for (int spins = 0; li_atomic_load(&pool->done) != (uint64_t)count && spins < LI_SPINS; spins++) li_pause();
  if (li_atomic_load(&pool->done) == (uint64_t)count) return;

  /* A worker was stopped in its share. Sleeping leaves a core free for it. */
  li_mutex_lock(&pool->mutex);
  li_atomic_store(&pool->waits, 1);
  while (li_atomic_load(&pool->done) != (uint64_t)count) li_condition_wait(&pool->finished, &pool->mutex);
  li_atomic_store(&pool->waits, 0);
  li_mutex_unlock(&pool->mutex);
}

LI_FN void li_pool_close(li_pool *pool) {
  if (!li_pool_has_workers(pool)) return;
  li_atomic_store(&pool->stop, 1);
  li_pool_publish(pool, 0);
  for (int64_t i = 0; i < pool->workers; i++) li_thread_join(pool->thread[i]);
  li_condition_close(&pool->wake);
  li_condition_close(&pool->finished);
  li_mutex_close(&pool->mutex);
}

/* Starts the threads in the caller's memory. If the system gives too few, the pool has none. */
LI_FN void li_pool_open(li_pool *pool, li_thread *thread, int64_t workers) {
  memset(pool, 0, sizeof *pool);
  pool->thread = thread;
  pool->process = li_process();
  li_mutex_open(&pool->mutex);
  li_condition_open(&pool->wake);
  li_condition_open(&pool->finished);
  while (pool->workers < workers && li_thread_start(&thread[pool->workers], li_worker_main, pool))
    pool->workers++;
  if (pool->workers == workers) return;
  li_pool_close(pool);
  pool->workers = 0;
}
#endif /* !LI_NO_POOL */

/* ----------------
   >>impl_context: contexts, failures and memory
   Memory is persistent (parameters and moments, until close) or belongs to the step (activations, a stack that a begin
   empties). Both are counted in multiples of 64 bytes, alike in every mode, so that a measuring context knows the size
   of a block. In a block the step grows up from the start, and persistent memory down from the end. First come the
   structs (luna_ctx, li_tensor_state, li_op_state), then sentences and failures, memory (li_persist, li_step,
   li_piece), and open, close and begin. A new failure is a row of LUNA_ERRORS. Guarded by tests/engine/memory.c and
   tests/robust/mistakes.c.
   ---------------- */
#include <stdarg.h>
#if !defined(LUNA_MALLOC) && !defined(LUNA_FREE)
#include <stdlib.h>
#define LUNA_MALLOC(size) malloc(size)
#define LUNA_FREE(pointer) free(pointer)
#elif !defined(LUNA_MALLOC) || !defined(LUNA_FREE)
#error "define both of LUNA_MALLOC and LUNA_FREE, or neither"
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define LI_HUGE_PAGE ((size_t)2 << 20)

typedef struct li_chunk {   /* It heads an allocation; the memory follows, aligned, or is on the device. */
  struct li_chunk *next;
  size_t raw_size;
  char *start;
  size_t size, used, place; /* For step blocks, place is start as pieces count it. */
  bool remote;              /* On the device */
} li_chunk;
typedef struct li_arena {   /* One kind of memory */
  li_chunk *persistent;     /* Allocator mode, newest first */
  li_chunk *steps;          /* Allocator mode: step blocks */
  size_t persistent_bytes, step_peak;
} li_arena;

/* The memory of a stream's step is one row of allocations, and a scope's end moves its result down to where the scope
   began. A step of single rows uses the same memory each time, so its ops are recorded, with their tensors, and later
   steps run them again. */
typedef struct li_bump {
  /* [0] has small things of the host, [1] has data. If data are only counted, start is null. */
  struct { char *start; size_t size, used, peak; } part[2];
  bool single;        /* The rows are single ones of their sequences, as luna_op.dots says. */
  bool records;       /* Record the ops run */
  luna_op *ops;       /* Recorded ones */
  size_t count, room;
  size_t floor, kept; /* Bytes of small things that stay: the stream's, and recorded ones. */
} li_bump;
LI_FN void li_bump_begin(li_bump *b, bool single) {
  b->part[0].used = b->kept;
  b->part[1].used = 0;
  b->single = single;
}
LI_FN void li_bump_forget(li_bump *b) {
  b->count = 0;
  b->kept = b->floor;
}

typedef struct li_hooked { /* By hooks, newest first */
  struct li_hooked *older;
  void (*close)(void *layer);
  void *layer;
} li_hooked;

typedef struct li_failure { /* A call that makes something leaves it. A begin clears only its status. */
  luna_status status;
  luna_error_id id;
  char error[320];
} li_failure;

/* This is what the tape and the step's memory know about an op and, below, about a tensor. */
typedef struct li_op_state {
  luna_op *previous, *next;    /* The tape */
  int64_t number;              /* On the tape */
  luna_op *recompute_from;     /* The newest op of a recomputed scope points to the oldest. */
  struct li_piece *kept_piece; /* Where kept lies */
  uint8_t depth;               /* This many cheap ops compute its result again (li_op_depth). */
  int readers;                 /* This many ops, of those computed again now, read its result. */
  const luna_trace_scope *scope; /* In which forward ran */
  li_attention_own attention;  /* Its dropout may belong to a part of a batch. */
} li_op_state;
/* A part of a batch has `own` sequences after the `first` ones. If own is 0, the tensor is no part. */
typedef struct li_cut { int64_t first, own; } li_cut;
typedef struct li_tensor_state {
  luna_op *maker;                   /* Made by this op */
  luna_op *last_reader;             /* Newest reader on tape */
  luna_tensor *older;               /* The step's previous tensor */
  int64_t offset;                   /* View's offset in base */
  struct li_piece *data_piece, *grad_piece; /* They can be released before the step ends. */
  bool keep_data, keep_grad;        /* luna_keep and luna_require_grad keep them until the next begin. */
  bool saved, released, recomputed; /* A backward reads data; data was released; it was computed again. */
  bool ended;                       /* Its step is over. It is released and points to nothing. */
  bool internal;                    /* Its scope has ended. Data are released once backward no longer reads them. */
  bool has_grad;                    /* Backward has reached it. When measuring, grad stays null. */
  bool given, borrowed;             /* A parameter's values are no longer its init's; they are another's. */
  li_cut cut;                       /* Part of a batch */
  int64_t counted;                  /* 1 + luna_counted */
} li_tensor_state;

/* The step's tensors, without their data, are in slabs that stay until close. Two successive steps use different
   places. A tensor from an earlier step stays a valid struct, marked ended, until its slot is reused two steps
   later. */
#define LI_SLAB 16
typedef struct li_slab {
  struct li_slab *next;
  luna_tensor of_step[2][LI_SLAB];
  li_tensor_state state[2][LI_SLAB];
} li_slab;
typedef struct li_mark {   /* A step's state */
  li_chunk *chunk[2];      /* In allocator mode these are the host's and the device's current step block. */
  size_t used[2];          /* Used there (marks only) */
  size_t bytes[2];         /* Step's, or stream's parts */
  size_t gaps[2];          /* Gaps between chunks, in places, keep pieces of two chunks from being joined. */
  int64_t pieces_made;
  luna_tensor *made;       /* The newest tensor */
  li_slab *slab;           /* Current, null without tensors */
  int slab_used;
  char *small, *small_end; /* Room for small things */
} li_mark;
typedef struct li_sharing { struct li_sharing *next; const luna_ctx *owner; } li_sharing;

#define LI_TRACE_PATHS 128
typedef struct li_trace_paths { int count; luna_trace_scope path[LI_TRACE_PATHS]; } li_trace_paths;

struct luna_ctx {
  luna_options options;
  li_tensor_state none;      /* It belongs to shapes and a stream's tensors, and is empty. */
  const li_kernels *kernels;
  const luna_backend *backend;
  li_parallel parallel;
  void *self;                /* The backend's, per context */
  struct li_sharing *sharing; /* Newest first, it lists contexts whose parameters this one reads, if work is queued. */
  char *block_start, *block_end; /* Block mode: what is between step and persistent memory is free. */
  li_arena arena[2];         /* The host has one, and a device another, which holds tensors' values. */
  struct li_bump *bump;      /* A stream's own context has all memory of its step here. */
  struct li_piece *pieces;   /* Free ones */
  struct li_piece *highest;  /* The highest of all is here if pieces are cut up and joined. */
  li_mark step;
  li_slab *slabs;
  size_t slabs_end;          /* The newest slab ends here, in persistent bytes. */
  uint32_t begins;           /* Odd and even steps have one half of the slabs each. */
  size_t peak;
  luna_step_state *state;    /* In backend memory */
  luna_op *tape;
  const luna_op *custom;     /* The one that runs */
  struct luna_lm_state *carried; /* Continued by the step */
  uint32_t dropout_ops;
  bool training;
  bool recomputing;          /* The step has recomputed scopes, so constants that the tape reads stay. */
  bool paused;               /* A stream is opened in training, and nothing joins the tape. */
  bool reserving;            /* A stream is opened: memory is counted, nothing computed. */
  bool differentiated;       /* luna_backward succeeded since begin */
  bool stepped;              /* An optimiser has stepped */
  uint64_t reported;         /* Skipped steps already logged */
  /* `status` is the first failure since begin, `last_status` that of the last call that returned one. */
  luna_status status, last_status;
  luna_status open_status;   /* If the device could not be opened, every call says so. */
  luna_error_id error_id;    /* The id of error */
  char error[320];
  const char *call;          /* Failures name the outermost init, load or save under way. */
  const char *path;          /* Its file, else null */
  int setups;                /* Inits under way, nested */
  li_failure failure;        /* The next begin reports this one, the first since the last begin or an earlier one. */
  uint64_t backwards;        /* Successful luna_backward calls */
  uint64_t writes;           /* Calls that changed parameters */
  struct luna_optimizer *optimizers; /* Newest first */
  bool unread;               /* An optimiser on a device has made a step that the host has not read. */
  luna_part part;            /* From luna_begin_part */
  bool shares;               /* Whether part is set */
  const luna_params *newest; /* Newest parameter set */
  li_hooked *hooked;
  luna_tracer trace;         /* Null: none */
  void *trace_user;
  li_trace_paths *paths;     /* Null before luna_trace */
  const luna_trace_scope *scope; /* Current, if traced */
};

/* Names the call that failures belong to, unless it is inside another call. Returns the outer one, for li_leave. */
LI_FN const char *li_enter(luna_ctx *ctx, const char *name) {
  const char *outer = ctx->call;
  if (!outer) ctx->call = name;
  return outer;
}

LI_FN void li_leave(luna_ctx *ctx, const char *outer) { ctx->call = outer; }

/* --- Sentences: %s text, %d int64_t, %f double, %t a tensor's shape --- */
typedef struct li_text { char *at, *end; } li_text;
LI_FN void li_put_char(li_text *text, char c) { if (text->at < text->end) *text->at++ = c; }
LI_FN void li_put(li_text *text, const char *s) { while (*s) li_put_char(text, *s++); }
LI_FN void li_put_number(li_text *text, int64_t value) {
  char digits[24];
  int i = (int)sizeof digits - 1;
  uint64_t rest = (uint64_t)value;
  if (value < 0) rest = 0 - rest;
  digits[i] = 0;
  do {
    digits[--i] = (char)('0' + rest % 10);
    rest /= 10;
  } while (rest != 0);
  if (value < 0) digits[--i] = '-';
  li_put(text, digits + i);
}

/* Writes a number to six decimals. */
LI_FN void li_put_real(li_text *text, double value) {
  int exponent = 0, digits = 6;
  double size = fabs(value);
  if (value < 0) li_put_char(text, '-');
  if (!(size < (double)INFINITY)) {
    li_put(text, value != value ? "NaN" : "Inf");
    return;
  }
  if (size >= 1e6 || (size > 0 && size < 1e-3)) {
    for (; size >= 9.9999995; exponent++) size /= 10;
    for (; size < 0.99999995; exponent--) size *= 10;
  }

  int64_t part = (int64_t)(size * 1e6 + 0.5);
  li_put_number(text, part / 1000000);
  part %= 1000000;
  if (part) li_put_char(text, '.');
  for (; part && digits > 0; digits--, part = part % 100000 * 10) li_put_char(text, (char)('0' + part / 100000));
  if (exponent) li_put_char(text, 'e');
  if (exponent) li_put_number(text, exponent);
}
LI_FN void li_put_shape(li_text *text, const luna_tensor *t) {
  li_put_char(text, '[');
  for (int i = 0; i < t->rank; i++) {
    if (i) li_put_char(text, ',');
    li_put_number(text, t->shape[i]);
  }
  li_put_char(text, ']');
}
LI_FN void li_format(char *out, size_t room, const char *format, va_list values) {
  li_text text = { out, out + room - 1 };
  for (; *format; format++) {
    if (*format != '%') li_put_char(&text, *format);
    else if (*++format == 's') li_put(&text, va_arg(values, const char *));
    else if (*format == 'd') li_put_number(&text, va_arg(values, int64_t));
    else if (*format == 'f') li_put_real(&text, va_arg(values, double));
    else if (*format == 't') li_put_shape(&text, va_arg(values, const luna_tensor *));
  }
  *text.at = 0;
}
LI_FN void li_print(char *out, size_t room, const char *format, ...) {
  va_list values;
  va_start(values, format);
  li_format(out, room, format, values);
  va_end(values);
}

/* Keeps a failure. In a call that is no op (ctx->call) the newest sentence counts, elsewhere the first since begin. */
LI_FN void li_report(luna_ctx *ctx, luna_error_id id, luna_status status, const char *sentence) {
  const bool open = ctx->open_status == LUNA_OK, in_call = ctx->call != NULL;
  if (in_call && !open) {
    ctx->last_status = ctx->open_status;
    return;
  }

  if (in_call) ctx->last_status = status;
  if (open && (in_call || ctx->status == LUNA_OK)) {
    ctx->error_id = id;
    li_print(ctx->error, sizeof ctx->error, "%s", sentence);
  }
  if (open && ctx->status == LUNA_OK) ctx->status = status;
  if (ctx->options.log) ctx->options.log(ctx->options.log_user, status, sentence);
}
LI_FN void li_report_values(luna_ctx *ctx, int id, va_list values) {
  char sentence[sizeof ctx->error];
  li_format(sentence, sizeof sentence, li_sentence_of((luna_error_id)id), values);
  li_report(ctx, (luna_error_id)id, (luna_status)li_statuses[id], sentence);
}
/* Sends options.log a sentence about something that is not a failure but seldom intended. */
LI_FN void li_note(const luna_ctx *ctx, const char *format, ...) {
  char sentence[sizeof ctx->error];
  va_list values;
  va_start(values, format);
  li_format(sentence, sizeof sentence, format, values);
  va_end(values);
  if (ctx->options.log) ctx->options.log(ctx->options.log_user, LUNA_OK, sentence);
}
/* Reports a failure: a LUNA_ERROR_... with its sentence's values. Returns null, for an op's `return li_fail(...)`. */
LI_FN luna_tensor *li_fail(luna_ctx *ctx, int id, ...) {
  va_list values;
  va_start(values, id);
  li_report_values(ctx, id, values);
  va_end(values);
  return NULL;
}
/* Does the same for a call that is no op. It returns the status and always leaves its own sentence. */
LI_FN luna_status li_fail_status(luna_ctx *ctx, int id, ...) {
  const char *outer = li_enter(ctx, "a call");
  va_list values;
  va_start(values, id);
  li_report_values(ctx, id, values);
  va_end(values);
  li_leave(ctx, outer);
  return ctx->last_status;
}
/* Reports a failure if the backend left no sentence. */
LI_FN luna_tensor *li_fail_backend(luna_ctx *ctx, const char *name, luna_status status) {
  char sentence[sizeof ctx->error];
  li_print(sentence, sizeof sentence, li_sentence_of(LUNA_ERROR_BACKEND), name, luna_status_text(status));
  li_report(ctx, LUNA_ERROR_BACKEND, status, sentence);
  return NULL;
}
/* Reports what a backend call returned, for `return`. The backend's own sentence stays. */
LI_FN luna_status li_backend_result(luna_ctx *ctx, const char *name, luna_status status) {
  if (status == LUNA_OK) return LUNA_OK;
  if (ctx->status == LUNA_OK) li_fail_backend(ctx, name, status);
  return ctx->last_status = ctx->status;
}
/* A failed check is false and leaves a sentence: by li_refuse in calls that return tensors, by li_refuse_call in calls
   that return a status, and by li_refused after a function that reports. */
#define li_refused(said) ((void)(said), false)
#define li_refuse(...) li_refused(li_fail(__VA_ARGS__))
#define li_refuse_call(...) li_refused(li_fail_status(__VA_ARGS__))
LI_FN luna_status li_fail_memory(luna_ctx *ctx, const char *name, uint64_t bytes) {
  return li_fail_status(ctx, LUNA_ERROR_NO_MEMORY, name, (int64_t)(bytes < INT64_MAX ? bytes : INT64_MAX),
                        (int64_t)luna_memory(ctx).current);
}
LI_FN luna_tensor *li_fail_op_memory(luna_ctx *ctx, const char *name, size_t bytes) {
  return li_fail(ctx, LUNA_ERROR_NO_MEMORY, name, (int64_t)bytes, (int64_t)luna_memory(ctx).current);
}
/* Reports a null input, unless its own failure is reported already. */
LI_FN luna_tensor *li_fail_null(luna_ctx *ctx, const char *name, const char *what) {
  if (ctx->status == LUNA_OK) li_fail(ctx, LUNA_ERROR_NULL_ARGUMENT, name, what);
  return NULL;
}

/* --- What configs may hold: true, or false with a sentence --- */
LI_FN bool li_in(luna_ctx *ctx, const char *name, const char *field, int64_t value, int64_t min, int64_t max) {
  return (value >= min && value <= max) || li_refuse_call(ctx, LUNA_ERROR_VALUE_RANGE, name, field, value, min, max);
}
LI_FN bool li_is_given(luna_ctx *ctx, const char *name, const char *what, bool given) {
  return given || li_refuse_call(ctx, LUNA_ERROR_NULL_ARGUMENT, name, what);
}
LI_FN bool li_is_probability(luna_ctx *ctx, const char *name, const char *field, float value) {
  return (value >= 0 && value < 1) || li_refuse_call(ctx, LUNA_ERROR_PROBABILITY, name, field, (double)value);
}
LI_FN bool li_is_number(luna_ctx *ctx, const char *name, const char *field, float value) {
  return li_is_finite(value) || li_refuse_call(ctx, LUNA_ERROR_NOT_FINITE_ARGUMENT, name, field, (double)value);
}
LI_FN bool li_is_rate(luna_ctx *ctx, const char *name, const char *field, float value) {
  return (value >= 0 && value < INFINITY) || li_refuse_call(ctx, LUNA_ERROR_NEGATIVE, name, field, (double)value);
}

LI_FN const char *li_file_name(const luna_ctx *ctx) { return ctx->path ? ctx->path : "the file"; }

/* --- Memory --- */
LI_FN void *li_raw_allocate(const luna_allocator *a, size_t bytes) {
  if (a->allocate) return a->allocate(a->user, bytes);
  return LUNA_MALLOC(bytes);
}
LI_FN void li_raw_release(const luna_allocator *a, void *at, size_t bytes) {
  if (a->allocate) a->release(a->user, at, bytes);
  else LUNA_FREE(at);
}

/* Returns whether the host cannot read values. */
LI_HOT bool li_on_device(const luna_ctx *ctx) {
  return ctx->backend->allocate && !ctx->options.measure;
}
/* If this is false, data pointers may be null, and only sizes are used. */
LI_HOT bool li_computes(const luna_ctx *ctx) { return !ctx->options.measure && !ctx->reserving; }
LI_FN bool li_queues(const luna_ctx *ctx) {
  return ctx->backend->wait && !ctx->options.measure && ctx->open_status == LUNA_OK;
}
LI_HOT size_t li_used(const luna_ctx *ctx) {
  return ctx->arena[0].persistent_bytes + ctx->arena[1].persistent_bytes + ctx->step.bytes[0] + ctx->step.bytes[1];
}

#ifndef LI_SEPARATE
#define LI_SEPARATE false /* For tests/cuda/cuda.c each tensor is alone in an allocation of its size. */
#endif

/* Returns a new chunk, large ones in huge pages, or null without memory. */
LI_FN li_chunk *li_chunk_open(const luna_ctx *ctx, bool remote, size_t size) {
  const size_t align = !remote && size >= 2 * LI_HUGE_PAGE ? LI_HUGE_PAGE : LI_ALIGN;
  const size_t extra = sizeof(li_chunk) + align, raw_size = remote ? extra : size + extra;
  char *raw = raw_size < extra ? NULL : (char *)li_raw_allocate(&ctx->options.allocator, raw_size);
  li_chunk *chunk = (li_chunk *)(void *)raw;
  if (!raw) return NULL;

  memset(chunk, 0, sizeof *chunk);
  chunk->raw_size = raw_size;
  chunk->start = raw + sizeof(li_chunk);
  chunk->start += (align - (uintptr_t)chunk->start % align) % align;
  chunk->size = size;
  chunk->remote = remote;
  if (remote) chunk->start = (char *)ctx->backend->allocate(ctx->self, size);
  if (!chunk->start) {
    li_raw_release(&ctx->options.allocator, raw, raw_size);
    return NULL;
  }
#ifdef MADV_HUGEPAGE
  if (align == LI_HUGE_PAGE) (void)madvise(chunk->start, size, MADV_HUGEPAGE);
#endif
  return chunk;
}
/* Releases the first chunk of a list, which must not hold the context itself. */
LI_FN void li_chunk_close(const luna_ctx *ctx, li_chunk **list) {
  li_chunk *chunk = *list;
  *list = chunk->next;
  if (chunk->remote) ctx->backend->release(ctx->self, chunk->start, chunk->size);
  li_raw_release(&ctx->options.allocator, chunk, chunk->raw_size);
}

LI_HOT bool li_room(const luna_ctx *ctx, size_t bytes) {
  const size_t most = ctx->options.block ? (size_t)(ctx->block_end - ctx->block_start) : SIZE_MAX / 2;
  return bytes <= most - li_used(ctx);
}
LI_HOT void li_count_peak(luna_ctx *ctx, bool remote) {
  const size_t used = li_used(ctx), bytes = ctx->step.bytes[remote];
  if (used > ctx->peak) ctx->peak = used;
  if (bytes > ctx->arena[remote].step_peak) ctx->arena[remote].step_peak = bytes;
}

/* Takes zeroed memory until close. Returns false if there is none. `data` is on the device if the context has one; if
   the context measures, it is only counted, and *out is null. */
LI_FN bool li_persist(luna_ctx *ctx, size_t bytes, bool data, void **out) {
  const size_t size = li_round(bytes);
  const bool remote = data && li_on_device(ctx);
  li_arena *arena = &ctx->arena[remote];
  *out = NULL;
  if (size < bytes || !li_room(ctx, size)) return false;
  if (!(data && ctx->options.measure)) {
    if (ctx->options.block) *out = ctx->block_end - arena->persistent_bytes - size;
    else {
      li_chunk *chunk = li_chunk_open(ctx, remote, remote && LI_SEPARATE ? bytes : size);
      if (!chunk) return false;
      chunk->next = arena->persistent;
      arena->persistent = chunk;
      *out = chunk->start;
    }

    if (!remote) memset(*out, 0, size);
    else if (ctx->backend->zero(ctx, *out, LI_SEPARATE ? bytes : size) != LUNA_OK) {
      li_chunk_close(ctx, &arena->persistent);
      return false;
    }
  }
  arena->persistent_bytes += size;
  li_count_peak(ctx, remote);
  return true;
}

typedef struct li_persist_mark { li_arena arena[2]; } li_persist_mark;
LI_FN li_persist_mark li_persistent(const luna_ctx *ctx) {
  li_persist_mark mark;
  memcpy(mark.arena, ctx->arena, sizeof mark.arena);
  return mark;
}
LI_FN void li_persist_rewind(luna_ctx *ctx, li_persist_mark mark) {
  const li_arena *was = mark.arena;
  /* An init ran ops, so their tensors stay, and all memory before them. */
  if (ctx->slabs_end > was[0].persistent_bytes) return;

  for (int i = 0; i < 2; i++) {
    while (ctx->arena[i].persistent != was[i].persistent) li_chunk_close(ctx, &ctx->arena[i].persistent);
    ctx->arena[i].persistent_bytes = was[i].persistent_bytes;
  }
}

/* Returns how far the step's memory is used, for li_step_rewind. */
LI_HOT li_mark li_step_mark(const luna_ctx *ctx) {
  li_mark mark = ctx->step;
  for (int i = 0; i < 2; i++) {
    if (ctx->bump) mark.bytes[i] = ctx->bump->part[i].used;
    else if (mark.chunk[i]) mark.used[i] = mark.chunk[i]->used;
  }
  return mark;
}

LI_HOT void li_tensor_end(luna_tensor *t, size_t end);
LI_FN void li_pieces_rewind(luna_ctx *ctx, size_t end);
LI_HOT void li_step_rewind(luna_ctx *ctx, li_mark mark) {
  for (int i = 0; i < 2 && ctx->bump; i++) ctx->bump->part[i].used = mark.bytes[i];
  if (ctx->bump) return;

  const size_t end = mark.bytes[li_on_device(ctx)] + mark.gaps[li_on_device(ctx)];
  for (luna_tensor *t = ctx->step.made; t != mark.made; t = t->own->older) li_tensor_end(t, end);
  if (ctx->step.pieces_made != mark.pieces_made) li_pieces_rewind(ctx, end);
  for (int i = 0; i < 2; i++) {
    li_chunk *after = mark.chunk[i] ? mark.chunk[i]->next : ctx->arena[i].steps;
    for (; after; after = after->next) after->used = 0;
    if (mark.chunk[i]) mark.chunk[i]->used = mark.used[i];
    else mark.chunk[i] = ctx->arena[i].steps;
  }
  ctx->step = mark;
}

/* Returns the first chunk from the current one on with `size` bytes left, else a new last chunk of `grown` bytes. */
LI_HOT li_chunk *li_chunk_for(luna_ctx *ctx, bool remote, size_t size, size_t grown) {
  const bool alone = remote && LI_SEPARATE;
  li_chunk *chunk = ctx->step.chunk[remote], **last = &ctx->arena[remote].steps;
  for (; chunk; chunk = chunk->next) {
    if (alone && chunk->size == size && chunk->used == 0) return chunk;
    if (!alone && chunk->size - chunk->used >= size) return chunk;
  }

  chunk = li_chunk_open(ctx, remote, alone || size > grown ? size : grown);
  if (!chunk && grown > size) chunk = li_chunk_open(ctx, remote, size);
  while (*last) last = &(*last)->next;
  *last = chunk;
  return chunk;
}

LI_HOT void *li_step_from_chunks(luna_ctx *ctx, bool remote, size_t size) {
  /* Outside training free pieces are joined, but not across chunks. So the host takes up to 64 MB more until the next
     begin, which stay untouched until needed. A device, where memory is short, takes little more. */
  const size_t min = (size_t)1 << 16, more = (size_t)64 << 20, used = ctx->step.bytes[remote];
  size_t bytes = remote ? 0 : used;
  if (!ctx->training && remote) bytes = used / 16;
  else if (!ctx->training) bytes += 7 * used < more ? 7 * used : more;
  if (bytes < min || !li_computes(ctx)) bytes = min;
  li_chunk *chunk = li_chunk_for(ctx, remote, size, bytes);
  if (!chunk) return NULL;

  if (ctx->step.chunk[remote] != chunk && li_computes(ctx)) ctx->step.gaps[remote] += LI_ALIGN;
  ctx->step.chunk[remote] = chunk;
  if (chunk->used == 0) chunk->place = used + ctx->step.gaps[remote];
  chunk->used += size;
  return chunk->start + chunk->used - size;
}
LI_FN bool li_bump_take(li_bump *b, bool data, size_t bytes, void **out) {
  const size_t align = data ? LI_ALIGN : 16, size = (bytes + align - 1) & ~(align - 1);
  size_t *used = &b->part[data].used;
  *out = NULL;
  if (size < bytes || size > b->part[data].size - *used) return false;
  if (b->part[data].start) *out = b->part[data].start + *used;
  *used += size;
  if (*used > b->part[data].peak) b->part[data].peak = *used;
  return true;
}
/* Takes memory of the step, not zeroed. `data` is as for li_persist. */
LI_HOT bool li_step(luna_ctx *ctx, size_t bytes, bool data, void **out) {
  const size_t size = li_round(bytes);
  if (ctx->bump) return li_bump_take(ctx->bump, data, bytes, out);
  const bool remote = data && li_on_device(ctx);
  *out = NULL;
  if (size < bytes || !li_room(ctx, size)) return false;
  if ((!data || li_computes(ctx)) && size > 0) {
    if (ctx->options.block) *out = ctx->block_start + ctx->step.bytes[remote];
    else *out = li_step_from_chunks(ctx, remote, remote && LI_SEPARATE ? bytes : size);
    if (!*out) return false;
  }
  ctx->step.bytes[remote] += size;
  li_count_peak(ctx, remote);
  return true;
}

/* Returns host memory of the step, or null with a sentence. */
LI_FN void *li_step_host(luna_ctx *ctx, const char *name, size_t bytes) {
  void *memory;
  if (!li_step(ctx, bytes ? bytes : 1, false, &memory)) li_fail_op_memory(ctx, name, bytes);
  return memory;
}
/* Returns zeroed host memory until close, or null with the sentence of a call that returns a status. */
LI_FN void *li_persist_host(luna_ctx *ctx, const char *name, size_t bytes) {
  void *memory;
  if (!li_persist(ctx, bytes, false, &memory)) li_fail_memory(ctx, name, bytes);
  return memory;
}

/* Small things of the host that last until the next begin are together, so that they do not separate pieces. */
#define LI_SMALL 2048
LI_HOT bool li_step_small(luna_ctx *ctx, size_t bytes, void **out) {
  const size_t size = (bytes + 15) / 16 * 16;
  li_mark *step = &ctx->step;
  if (ctx->bump || size > LI_SMALL / 2) return li_step(ctx, bytes, false, out);
  if (!step->small || (size_t)(step->small_end - step->small) < size) {
    if (!li_step(ctx, LI_SMALL, false, out)) return false;
    step->small = (char *)*out;
    step->small_end = step->small + LI_SMALL;
  }
  *out = step->small;
  step->small += size;
  return true;
}

/* Pieces are parts of the step's memory that can be released before the step ends. Tensors' data and gradients are in
   pieces. In training most sizes recur, and pieces stay as they are; otherwise they are cut up and joined. Places count
   bytes from the step's start, alike in every mode, so all modes decide alike. But pieces of two chunks are not joined,
   so a step that takes new chunks can take a little more or less than later steps. Free pieces are a treap, sorted by
   size, then by falling place, with pseudo-random priorities. Finding, taking and giving back a piece takes logarithmic
   time. */
typedef struct li_piece {
  struct li_piece *by_size[2];    /* Children in the treap; a taken piece has itself in [0]. */
  struct li_piece *below, *above; /* If pieces are cut up and joined, these are its neighbours, free or taken. */
  size_t place, size;
} li_piece;
LI_HOT bool li_pieces_alone(const luna_ctx *ctx) { return LI_SEPARATE && li_on_device(ctx); }
LI_HOT bool li_pieces_split(const luna_ctx *ctx) {
  return !ctx->bump && !ctx->training && !li_pieces_alone(ctx);
}
LI_HOT li_piece *li_piece_make(luna_ctx *ctx, size_t size) {
  void *memory;
  if (!li_step_small(ctx, sizeof(li_piece), &memory)) return NULL;
  li_piece *piece = (li_piece *)memory;
  piece->by_size[0] = piece;
  piece->below = piece->above = NULL;
  piece->size = size;
  ctx->step.pieces_made++;
  return piece;
}
/* Returns a piece's memory, or null if memory is only counted. */
LI_HOT void *li_piece_at(const luna_ctx *ctx, const li_piece *piece) {
  const li_chunk *chunk = ctx->arena[li_on_device(ctx)].steps;
  if (!li_computes(ctx)) return NULL;
  if (ctx->options.block) return ctx->block_start + piece->place;
  while (chunk && piece->place - chunk->place >= chunk->used) chunk = chunk->next;
  if (!chunk) return NULL; /* A piece without bytes */
  return chunk->start + (piece->place - chunk->place);
}
LI_FN void li_piece_link(luna_ctx *ctx, li_piece *piece, li_piece *below) {
  piece->below = below;
  if (below) {
    piece->above = below->above;
    below->above = piece;
  }
  if (piece->above) piece->above->below = piece;
  else ctx->highest = piece;
}
LI_HOT bool li_piece_before(const li_piece *a, const li_piece *b) {
  return a->size < b->size || (a->size == b->size && a->place > b->place);
}
LI_HOT uint64_t li_piece_priority(const li_piece *piece) { /* Different places never have the same one. */
  const uint64_t mixed = (uint64_t)piece->place * 0x9E3779B97F4A7C15u;
  return (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u;
}
/* Puts a piece below those of higher priority. It splits what was there into smaller and larger pieces. */
LI_HOT void li_piece_insert(luna_ctx *ctx, li_piece *piece) {
  const uint64_t priority = li_piece_priority(piece);
  li_piece **link = &ctx->pieces, **side[2] = { &piece->by_size[0], &piece->by_size[1] };
  while (*link && li_piece_priority(*link) > priority) link = &(*link)->by_size[li_piece_before(*link, piece)];
  li_piece *rest = *link;
  *link = piece;
  while (rest) {
    const bool after = !li_piece_before(rest, piece);
    *side[after] = rest;
    side[after] = &rest->by_size[!after];
    rest = *side[after];
  }
  *side[0] = *side[1] = NULL;
}

LI_HOT void li_piece_remove(luna_ctx *ctx, li_piece *piece) {
  li_piece **link = &ctx->pieces, *before = piece->by_size[0], *after = piece->by_size[1];
  while (*link != piece) link = &(*link)->by_size[li_piece_before(*link, piece)];
  while (before && after) {
    if (li_piece_priority(before) > li_piece_priority(after)) {
      *link = before;
      link = &before->by_size[1];
      before = *link;
    } else {
      *link = after;
      link = &after->by_size[0];
      after = *link;
    }
  }
  *link = before ? before : after;
  piece->by_size[0] = piece;
}

/* Takes the smallest free piece that is large enough, else a new one. */
LI_HOT li_piece *li_piece_take(luna_ctx *ctx, size_t bytes) {
  const bool alone = li_pieces_alone(ctx), splits = li_pieces_split(ctx);
  const size_t size = alone ? bytes : li_round(bytes);
  size_t slack = alone ? 0 : size / 8; /* Allowed excess */
  if (splits) slack = 24 * size;
  const bool remote = li_on_device(ctx);
  li_piece *best = NULL, *rest;
  void *at; /* li_piece_at finds it */
  for (li_piece *piece = ctx->pieces; piece; piece = piece->by_size[piece->size < size])
    if (piece->size >= size) best = piece;

  if (!best || best->size - size > slack) {
    li_piece *piece = li_piece_make(ctx, size);
    if (!piece || !li_step(ctx, bytes, true, &at)) return NULL;
    piece->place = ctx->step.bytes[remote] + ctx->step.gaps[remote] - li_round(bytes);
    if (splits) li_piece_link(ctx, piece, ctx->highest);
    return piece;
  }
  if (best->size == size || !splits) {
    li_piece_remove(ctx, best);
    return best;
  }

  if ((rest = li_piece_make(ctx, best->size - size)) == NULL) return NULL;
  li_piece_remove(ctx, best);
  best->size = size;
  rest->place = best->place + size;
  li_piece_link(ctx, rest, best);
  li_piece_insert(ctx, rest);
  return best;
}
/* Joins two neighbours into the lower one, if possible. Only `other` may be free. */
LI_FN bool li_piece_join(luna_ctx *ctx, li_piece *lower, li_piece *upper, li_piece *other) {
  if (!other || other->by_size[0] == other || lower->place + lower->size != upper->place) return false;
  li_piece_remove(ctx, other);
  lower->size += upper->size;
  lower->above = upper->above;
  if (lower->above) lower->above->below = lower;
  else ctx->highest = lower;
  return true;
}
/* Frees a piece. If pieces are cut up, free neighbours join it first. */
LI_HOT void li_piece_give(luna_ctx *ctx, li_piece **given) {
  li_piece *piece = *given;
  *given = NULL;
  if (!piece || piece->size == 0) return;
  if (li_pieces_split(ctx)) {
    li_piece *const below = piece->below;
    (void)li_piece_join(ctx, piece, piece->above, piece->above);
    if (li_piece_join(ctx, below, piece, below)) piece = below;
  }
  li_piece_insert(ctx, piece);
}

/* Goes back to when the step's memory ended at `end`. The pieces free then are free again, unless taken since and not
   given back. But if pieces are cut up none is free, since some are themselves in memory that goes. */
LI_FN void li_pieces_rewind(luna_ctx *ctx, size_t end) {
  li_piece *piece, *next, *list = NULL; /* Linked by by_size[1] */
  for (piece = ctx->highest; piece; piece = next) {
    next = piece->below;
    piece->below = piece->above = NULL;
  }
  ctx->highest = NULL;
  if (end == 0 || li_pieces_split(ctx)) ctx->pieces = NULL;
  while ((piece = ctx->pieces) != NULL) {
    li_piece_remove(ctx, piece);
    piece->by_size[1] = list;
    list = piece;
  }
  for (piece = list; piece; piece = next) {
    next = piece->by_size[1];
    if (piece->place < end) li_piece_insert(ctx, piece);
  }
}

/* Empties the step. Several blocks become one of their total size, so that a steady step allocates nothing. */
LI_FN void li_step_clear(luna_ctx *ctx) {
  li_mark nothing;
  memset(&nothing, 0, sizeof nothing);
  li_step_rewind(ctx, nothing);
  ctx->begins++;
  if (!ctx->options.measure) { /* A measuring context owns nothing that it counts. */
    for (int i = 0; i < 2; i++) {
      li_arena *arena = &ctx->arena[i];
      if (!arena->steps || !arena->steps->next) continue;
      while (arena->steps) li_chunk_close(ctx, &arena->steps);
      if (!(i == 1 && LI_SEPARATE)) arena->steps = li_chunk_open(ctx, i == 1, arena->step_peak);
      ctx->step.chunk[i] = arena->steps;
    }
  }
}

LUNA_API luna_memory_usage luna_memory(const luna_ctx *ctx) {
  luna_memory_usage use = { 0, 0 };
  if (!ctx) return use;

  use.current = li_used(ctx) + (LI_ALIGN - 1); /* A block may have any alignment. */
  use.peak = ctx->peak + (LI_ALIGN - 1);
  return use;
}

/* --- Open and close --- */
LI_FN void li_close_hooked(luna_ctx *ctx, const li_hooked *last) {
  for (; ctx->hooked != last; ctx->hooked = ctx->hooked->older)
    if (ctx->hooked->close) ctx->hooked->close(ctx->hooked->layer);
}
LUNA_API void luna_close(luna_ctx *ctx) {
  if (!ctx) return;
  li_close_hooked(ctx, NULL);
#ifndef LI_NO_POOL
  if (ctx->parallel.run == li_pool_run) li_pool_close((li_pool *)ctx->parallel.user);
#endif
  luna_ctx last = *ctx; /* The host's oldest chunk holds ctx. */
  for (int i = 1; i >= 0; i--) {
    if (i == 0 && last.self) last.backend->close(last.self);
    while (last.arena[i].steps) li_chunk_close(&last, &last.arena[i].steps);
    while (last.arena[i].persistent) li_chunk_close(&last, &last.arena[i].persistent);
  }
}

/* Returns false without memory. */
LI_FN bool li_open_threads(luna_ctx *ctx) {
  const luna_options *o = &ctx->options;
  int threads = o->threads;
  if (threads <= 0) threads = o->parallel_for ? 1 : li_cores();
  ctx->parallel.run = o->parallel_for;
  ctx->parallel.user = o->parallel_user;
  ctx->parallel.threads = li_min(threads, LI_MAX_THREADS);
  if (o->parallel_for || threads == 1) return true;

#ifdef LI_NO_POOL
  ctx->parallel.threads = 1;
#else
  const size_t pool_size = li_round(sizeof(li_pool));
  const int64_t workers = li_min(ctx->parallel.threads, li_cores()) - 1;
  void *memory; /* Enough for all threads */

  if (!li_persist(ctx, pool_size + (size_t)(ctx->parallel.threads - 1) * sizeof(li_thread), false, &memory))
    return false;
  if (o->measure || workers == 0) return true;

  li_pool_open((li_pool *)memory, (li_thread *)(void *)((char *)memory + pool_size), workers);
  if (((li_pool *)memory)->workers == 0) return true;
  ctx->parallel.run = li_pool_run;
  ctx->parallel.user = memory;
#endif
  return true;
}

LI_FN luna_ctx *li_open_failed(const luna_options *o, luna_status status, const char *sentence) {
  if (o->error) *o->error = sentence;
  if (o->log) o->log(o->log_user, status, sentence);
  return NULL;
}
LI_FN luna_ctx *li_open_no_memory(const luna_options *o) {
  if (o->block) return li_open_failed(o, LUNA_OUT_OF_MEMORY, "luna_open: options.block is too small");
  return li_open_failed(o, LUNA_OUT_OF_MEMORY, "luna_open: no memory for a context");
}
LI_FN const char *li_options_wrong(const luna_ctx *ctx) {
  const luna_options *o = &ctx->options;
  if (!ctx->kernels) return "luna_open: this build or machine lacks the instruction set options.isa";
  if (o->threads < 0) return "luna_open: options.threads is below 0";
  if (!o->allocator.allocate != !o->allocator.release)
    return "luna_open: options.allocator has allocate without release, or the reverse";
  if ((unsigned)o->form > LUNA_FORM_FOLDED) return "luna_open: options.form is no luna_form";
  if ((unsigned)o->weights > LUNA_DTYPE_I8) return "luna_open: options.weights is neither F32 nor I8";
  if (o->products != LUNA_DTYPE_F32 && o->products != LUNA_DTYPE_BF16)
    return "luna_open: options.products is neither F32 nor BF16";
#ifdef LUNA_NO_BF16
  if (o->products) return "luna_open: options.products: this build has no products in 16 bits (LUNA_NO_BF16)";
#endif
#ifdef LUNA_NO_INT8
  if (o->weights) return "luna_open: options.weights: this build has no products in 8 bits (LUNA_NO_INT8)";
#endif
  if ((o->weights || o->products) && li_on_device(ctx))
    return "luna_open: options.weights and options.products are the CPU's and must be 0 on a device; for tensor cores "
           "luna_cuda.cuh has luna_cuda_backend_with";
  if (ctx->backend->version != 1 || ctx->backend->size != sizeof(luna_backend))
    return "luna_open: options.backend was compiled with another version of luna.h";
  if (o->block && li_on_device(ctx)) return "luna_open: a device has memory of its own; options.block must be null";
  return NULL;
}

LUNA_API luna_ctx *luna_open(const luna_options *options) {
  luna_ctx first;
  luna_status status = LUNA_OK;
  void *memory;
  memset(&first, 0, sizeof first);
  luna_options *o = &first.options;
  if (options) *o = *options;
  first.kernels = li_kernels_for(o->isa, o->weights || o->products);
  first.backend = o->backend ? o->backend : luna_cpu_backend();
  const char *wrong = li_options_wrong(&first);
  if (wrong) return li_open_failed(o, LUNA_BAD_ARGUMENT, wrong);

  if (o->block) {
    char *start = (char *)o->block;
    const size_t shift = (LI_ALIGN - (uintptr_t)start % LI_ALIGN) % LI_ALIGN;
    if (o->block_size < shift) return li_open_no_memory(o);
    first.block_start = start + shift;
    first.block_end = first.block_start + (o->block_size - shift) / LI_ALIGN * LI_ALIGN;
  }

  if (!li_persist(&first, sizeof first, false, &memory)) return li_open_no_memory(o);
  luna_ctx *ctx = (luna_ctx *)memory; /* The context is in the memory that it counts. */
  *ctx = first;
  if (ctx->backend->allocate) ctx->arena[1].persistent_bytes = li_round(ctx->backend->opened);
  if (ctx->backend->open && !o->measure) status = ctx->backend->open(ctx, ctx->backend->device, &ctx->self);
  if (status == LUNA_OK) {
    if (!li_persist(ctx, sizeof(luna_step_state), !o->measure, &memory) || !li_open_threads(ctx)) {
      luna_close(ctx);
      return li_open_no_memory(o);
    }
    ctx->state = (luna_step_state *)memory;
    ctx->options.threads = (int)li_threads(&ctx->parallel);
    if (!o->measure) status = ctx->backend->copy(ctx, &ctx->state->seed, &o->seed, sizeof o->seed, 1);
  }

  if (status != LUNA_OK && ctx->status == LUNA_OK)
    luna_fail(ctx, status, "luna_open: the device could not be opened");
  ctx->open_status = status;
  return ctx;
}

/* On a device, orders this context's next work after what the owners of its shared sets have queued. */
LI_FN luna_status li_wait_for_owners(luna_ctx *ctx) {
  luna_status status = LUNA_OK;
  for (const li_sharing *one = ctx->sharing; one && status == LUNA_OK; one = one->next)
    status = ctx->backend->wait(ctx, one->owner);
  return status;
}

LUNA_API luna_isa luna_isa_of(const luna_ctx *ctx) { return ctx ? ctx->kernels->isa : luna_isa_best(); }
/* Returns whether the next begin repeats this step. */
LI_FN bool li_step_failed(const luna_ctx *ctx) {
  return ctx->training && ctx->status != LUNA_OK && !ctx->differentiated;
}
LI_FN void li_state_turn(struct luna_lm_state *s);
/* Clears the error, or sets that of a call that failed to make something since the last begin. */
LI_FN void li_clear_error(luna_ctx *ctx) {
  ctx->status = ctx->failure.status;
  ctx->error_id = LUNA_ERROR_NONE;
  ctx->error[0] = 0;
  if (ctx->status == LUNA_OK) return;
  ctx->error_id = ctx->failure.id;
  memcpy(ctx->error, ctx->failure.error, sizeof ctx->error);
  ctx->failure.status = LUNA_OK;
}

LI_FN void li_trace_begin(luna_ctx *ctx, const char *name);
LI_FN luna_status li_begin(luna_ctx *ctx, bool training) {
  const char *name = training ? "luna_begin_step" : "luna_begin_inference";
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (ctx->open_status != LUNA_OK) return ctx->open_status;

  const bool repeated = li_step_failed(ctx); /* Keeps number and dropout */
  if (ctx->carried) li_state_turn(ctx->carried);
  ctx->tape = NULL;
  ctx->dropout_ops = 0;
  ctx->training = training;
  ctx->shares = false;
  ctx->carried = NULL;
  ctx->paused = ctx->recomputing = ctx->differentiated = false;
  li_clear_error(ctx);

  luna_status status = li_wait_for_owners(ctx);
  if (status == LUNA_OK && training && !LI_REFERENCE_TRAINS && ctx->options.isa == LUNA_ISA_REFERENCE)
    status = li_fail_status(ctx, LUNA_ERROR_REFERENCE_STEP);
  if (status == LUNA_OK && !ctx->options.measure)
    status = ctx->backend->begin(ctx, ctx->state, training && !repeated, ctx->stepped);
  li_step_clear(ctx);
  ctx->stepped = false;
  (void)li_backend_result(ctx, name, status);
  li_trace_begin(ctx, name);
  return ctx->status;
}
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_begin_step(luna_ctx *ctx) { return li_begin(ctx, true); }
#endif
LUNA_API luna_status luna_begin_part(luna_ctx *ctx, const luna_part *part) {
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (part && !(li_in(ctx, __func__, "first", part->first, 0, LI_MAX_COUNT) &&
                li_in(ctx, __func__, "longest", part->longest, 0, LI_MAX_COUNT) &&
                li_in(ctx, __func__, "target_longest", part->target_longest, 0, LI_MAX_COUNT))) return ctx->last_status;

  ctx->shares = part != NULL;
  if (part) ctx->part = *part;
  return LUNA_OK;
}
LUNA_API const luna_options *luna_options_of(const luna_ctx *ctx) { return ctx ? &ctx->options : NULL; }
LUNA_API luna_status luna_begin_inference(luna_ctx *ctx) { return li_begin(ctx, false); }
LUNA_API luna_status luna_error_status(const luna_ctx *ctx) { return ctx ? ctx->status : LUNA_BAD_ARGUMENT; }
LUNA_API const char *luna_error(const luna_ctx *ctx) {
  if (ctx) return ctx->error;
  return li_sentence_of(LUNA_ERROR_NO_CONTEXT);
}
LUNA_API luna_error_id luna_error_id_of(const luna_ctx *ctx) { return ctx ? ctx->error_id : LUNA_ERROR_NO_CONTEXT; }
LUNA_API const luna_backend *luna_backend_of(const luna_ctx *ctx) { return ctx ? ctx->backend : NULL; }
LUNA_API void *luna_backend_self(const luna_ctx *ctx) { return ctx ? ctx->self : NULL; }
LUNA_API luna_step_state *luna_backend_state(const luna_ctx *ctx) { return ctx ? ctx->state : NULL; }
LUNA_API luna_status luna_fail(luna_ctx *ctx, luna_status status, const char *sentence) {
  if (ctx) li_report(ctx, LUNA_ERROR_BACKEND, status, sentence ? sentence : luna_status_text(status));
  return status;
}
/* Reads the state and waits for the device. Gives zeros if there is no state or this fails. */
LI_FN luna_status li_state_read(luna_ctx *ctx, const luna_step_state *state, luna_step_state *now) {
  memset(now, 0, sizeof *now);
  if (state && !ctx->options.measure) return ctx->backend->copy(ctx, now, state, sizeof *now, 2);
  return LUNA_OK;
}
LI_FN luna_step_state li_state_of(luna_ctx *ctx, const luna_step_state *state) {
  luna_step_state now;
  (void)li_state_read(ctx, state, &now);
  return now;
}

/* ----------------
   >>impl_backend: the kinds of ops, and what the CPU's backend does beside them: it copies and zeroes memory, counts
   steps, and makes the optimisers' norm and update. >>impl_ops has the ops and, at its end, the table with all of this.
   Guarded by tests/engine/trainer.c and tests/engine/optimizer_hook.c.
   ---------------- */
static const struct { const char *name; int reads; bool cheap; } li_ops[] = {
#define LI_OP_KIND(name, tier, reads, cheap) { #name, reads, cheap },
#define LI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) { #name, reads, cheap },
  LUNA_OPS(LI_OP_KIND, LI_OP_EACH)
#undef LI_OP_EACH
#undef LI_OP_KIND
};
LUNA_API const char *luna_op_name(luna_op_kind kind) {
  if ((unsigned)kind < LUNA_OP_COUNT) return li_ops[kind].name;
  return "unknown";
}

#define LI_SPLIT 8192 /* Elements worth a thread */

LI_INLINE int64_t li_last(const luna_tensor *t) { return t->rank ? t->shape[t->rank - 1] : 1; }
LI_HOT int64_t li_rows(const luna_tensor *t) {
  int64_t rows = 1;
  for (int a = 0; a + 1 < t->rank; a++) rows *= t->shape[a];
  return rows;
}
LI_INLINE const luna_tensor *li_owner(const luna_tensor *t) { return t && t->base ? t->base : t; }

LI_HOT luna_status li_cpu_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  (void)ctx, (void)direction;
  li_copy(to, from, bytes);
  return LUNA_OK;
}
LI_FN luna_status li_cpu_begin(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped) {
  (void)ctx;
  if (stepped) state->nonfinite = 0;
  state->step += training;
  return LUNA_OK;
}
LI_HOT luna_status li_cpu_zero(luna_ctx *ctx, void *at, size_t bytes) {
  (void)ctx;
  if (bytes) memset(at, 0, bytes);
  return LUNA_OK;
}

LI_FN luna_status li_cpu_check(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state) {
  (void)ctx;
  if (!(loss->data[0] - loss->data[0] == 0)) state->nonfinite = 1;
  return LUNA_OK;
}

#ifndef LUNA_NO_TRAIN
/* --- The optimisers' norm and update: sums over a parameter in blocks, added in their order --- */
#define LI_SUM_BLOCK 65536
typedef struct li_update_work {
  const li_kernels *kernels;
  li_update update;
  const luna_rule *rule; /* If this is null, the sums are of the gradient's squares. */
  double sums[4], partial[64][4];
} li_update_work;
LI_HOT li_update li_update_part(const li_update *whole, int64_t first, int64_t last) {
  li_update u = *whole;
  u.value = li_offset(u.value, first);
  u.grad += first;
  for (int i = 0; i < 3; i++) u.moment[i] = li_offset(u.moment[i], first);
  u.average = li_offset(u.average, first);
  u.count = last - first;
  return u;
}

LI_HOT luna_optimizer_part li_hook_part(const li_update_work *w, const li_update *u) {
  const luna_optimizer_part part = { u->value, u->grad, { u->moment[0], u->moment[1], u->moment[2] }, u->count, u->lr,
                                     u->decay, u->factor, (int64_t)w->rule->state->updates, w->rule->config,
                                     w->kernels->isa };
  return part;
}
LI_HOT void li_sums_task(void *work, int64_t thread, int64_t first, int64_t last) {
  li_update_work *w = (li_update_work *)work;
  (void)thread;
  for (int64_t i = first; i < last; i++) {
    const li_update u = li_update_part(&w->update, i * LI_SUM_BLOCK, li_min((i + 1) * LI_SUM_BLOCK, w->update.count));
    if (w->rule) {
      const luna_optimizer_part part = li_hook_part(w, &u);
      w->rule->hook->reduce(&part, w->partial[i]);
    } else {
      w->partial[i][0] = w->kernels->sum_squares(u.count, u.grad);
    }
  }
}

/* Adds the hook's sums to w->sums, or the gradient's squares to the first of them. */
LI_HOT void li_sums_add(luna_ctx *ctx, li_update_work *w) {
  const li_update whole = w->update;
  for (int64_t at = 0; at < whole.count; at += 64 * LI_SUM_BLOCK) {
    w->update = li_update_part(&whole, at, li_min(at + 64 * LI_SUM_BLOCK, whole.count));
    const int64_t blocks = li_divide_up(w->update.count, LI_SUM_BLOCK);
    li_each(&ctx->parallel, blocks, li_sums_task, w);
    for (int64_t i = 0; i < blocks; i++)
      for (int k = 0; k < 4; k++) w->sums[k] += w->partial[i][k];
  }
  w->update = whole;
}

/* Computes the norm of all gradients together, then the clip factor, and whether this step is skipped. */
LI_FN luna_status li_cpu_norm(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                              const luna_update *table, int64_t count) {
  luna_step_state *state = rule->state;
  li_update_work w;
  (void)table;
  memset(&w, 0, sizeof w);
  w.kernels = ctx->kernels;
  for (int64_t p = 0; p < count; p++) {
    w.update.grad = parts[p].grad;
    w.update.count = parts[p].count;
    li_sums_add(ctx, &w);
  }
  const double sum = sqrt(w.sums[0]);
  state->norm = (float)sum;
  state->factor = 1;
  if (rule->clip > 0 && state->norm > rule->clip)
    state->factor = state->norm < INFINITY ? rule->clip / state->norm : (float)((double)rule->clip / sum);
  state->nonfinite = ctx->state->nonfinite || !(sum * (double)state->factor <= (double)rule->largest);
  state->updates += !state->nonfinite;
  state->skipped += (uint64_t)state->nonfinite;
  ctx->state->skipped += (uint64_t)state->nonfinite;
  state->skipped_in_row++;
  if (!state->nonfinite) state->skipped_in_row = 0;
  return LUNA_OK;
}

LI_HOT void li_update_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_update_work *w = (const li_update_work *)work;
  const li_update u = li_update_part(&w->update, first * LI_SPLIT, li_min(last * LI_SPLIT, w->update.count));
  (void)thread;
  if (w->rule->hook) {
    const luna_optimizer_part part = li_hook_part(w, &u);
    w->rule->hook->update(&part, w->sums);
    memset(u.grad, 0, li_bytes(u.count));
  } else if (w->rule->kind == LUNA_OPTIMIZER_SGD) {
    w->kernels->sgd(&u);
  } else {
    w->kernels->adam(&u);
  }
  if (u.average)
    for (int64_t i = 0; i < u.count; i++) u.average[i] += u.share * (u.value[i] - u.average[i]);
}

/* With t steps made, the bias corrections are 1 - beta^t. */
LI_HOT void li_cpu_update_one(luna_ctx *ctx, const luna_rule *rule, const luna_update *part) {
  const luna_step_state *state = rule->state;
  const double t = (double)state->updates;
  li_update_work w;
  memset(&w, 0, sizeof w);
  w.kernels = ctx->kernels;
  w.rule = rule;
  w.update.value = part->value;
  w.update.grad = part->grad;
  for (int i = 0; i < 3; i++) w.update.moment[i] = part->moment[i];
  w.update.average = part->average;
  w.update.share = (float)((1 - (double)rule->average) / (1 - pow((double)rule->average, t)));
  w.update.count = part->count;
  w.update.lr = state->lr * part->lr;
  w.update.factor = state->factor;
  w.update.decay = part->decay;
  w.update.momentum = rule->momentum;
  w.update.nesterov = rule->nesterov;
  w.update.coupled = rule->kind == LUNA_OPTIMIZER_ADAM;
  w.update.beta1 = rule->beta1;
  w.update.beta2 = rule->beta2;
  w.update.epsilon = rule->epsilon;
  w.update.correction1 = (float)(1 - pow((double)rule->beta1, t));
  w.update.correction2 = (float)(1 - pow((double)rule->beta2, t));
  if (rule->hook && rule->hook->reduce) li_sums_add(ctx, &w);
  li_each(&ctx->parallel, li_divide_up(w.update.count, LI_SPLIT), li_update_task, &w);
}

LI_FN luna_status li_cpu_update(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                const luna_update *table, int64_t count) {
  (void)table;
  for (int64_t p = 0; p < count; p++) {
    if (!rule->state->nonfinite) li_cpu_update_one(ctx, rule, &parts[p]);
    else if (parts[p].count) memset(parts[p].grad, 0, li_bytes(parts[p].count));
  }
  return LUNA_OK;
}
#endif /* !LUNA_NO_TRAIN */

/* ----------------
   >>impl_trace: the events of luna_trace
   Each path of scopes is kept once (li_trace_paths), so that an op of the tape can name its own. First comes the clock,
   then scopes and begins, then ops and their costs. An op with new products needs a case in li_op_flops. Guarded by
   tests/engine/profile.c.
   ---------------- */
#if !defined(_WIN32) && (defined(__unix__) || defined(__APPLE__) || defined(__wasi__))
#include <sys/time.h>
#endif
LUNA_API double luna_seconds(luna_ctx *ctx) {
  uint64_t step;
  if (ctx && ctx->state && li_on_device(ctx) && li_computes(ctx))
    (void)ctx->backend->copy(ctx, &step, &ctx->state->step, sizeof step, 2);
#if defined(_WIN32)
  LARGE_INTEGER now, second;
  QueryPerformanceFrequency(&second);
  QueryPerformanceCounter(&now);
  return (double)now.QuadPart / (double)second.QuadPart;
#elif defined(__unix__) || defined(__APPLE__) || defined(__wasi__)
  struct timeval now; /* Strict C99 hides clock_gettime. */
  gettimeofday(&now, NULL);
  return (double)now.tv_sec + 1e-6 * (double)now.tv_usec;
#else
  return 0;
#endif
}
LUNA_API luna_status luna_trace(luna_ctx *ctx, luna_tracer function, void *user) {
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (function && !ctx->paths)
    ctx->paths = (li_trace_paths *)li_persist_host(ctx, __func__, sizeof(li_trace_paths));
  if (function && !ctx->paths) return ctx->last_status;

  ctx->trace = function;
  ctx->trace_user = user;
  return LUNA_OK;
}

LI_FN luna_trace_event li_trace_start(luna_ctx *ctx, luna_trace_kind kind, const char *name,
                                      const luna_trace_scope *scope) {
  luna_trace_event e;
  memset(&e, 0, sizeof e);
  e.kind = kind;
  e.name = name;
  e.scope = scope;
  e.start = luna_seconds(ctx);
  return e;
}
LI_FN void li_trace_send(luna_ctx *ctx, luna_trace_event e) {
  const double seconds = luna_seconds(ctx) - e.start;
  e.seconds = seconds > 0 ? seconds : 0; /* Clocks may be set back. */
  if (ctx->trace) ctx->trace(ctx->trace_user, &e);
}

/* Returns the path of a scope with this name inside the current one, or null if no more paths fit. */
LI_FN luna_trace_scope *li_trace_path(luna_ctx *ctx, const char *name) {
  li_trace_paths *paths = ctx->paths;
  if (strncmp(name, "luna_", 5) == 0) name += 5;
  else if (strncmp(name, "li_", 3) == 0) name += 3;
  for (int i = 0; i < paths->count; i++)
    if (paths->path[i].outer == ctx->scope && strcmp(paths->path[i].name, name) == 0) return &paths->path[i];
  if (paths->count == LI_TRACE_PATHS) return NULL;

  luna_trace_scope *path = &paths->path[paths->count++];
  path->name = name;
  path->outer = ctx->scope;
  return path;
}
LI_FN void li_trace_enter(luna_ctx *ctx, const char *name) {
  luna_trace_scope *scope = li_trace_path(ctx, name);
  if (!scope) return;
  const luna_trace_event e = li_trace_start(ctx, LUNA_TRACE_SCOPE_BEGIN, scope->name, scope);
  ctx->scope = scope;
  scope->start = e.start;
  li_trace_send(ctx, e);
}
/* Ends the scopes inside `outer`. If the current scope is not inside it, they have ended already. */
LI_FN void li_trace_leave(luna_ctx *ctx, const luna_trace_scope *outer) {
  const luna_trace_scope *around = ctx->scope;
  while (around && around != outer) around = around->outer;
  if (around != outer) return;

  for (; ctx->scope != outer; ctx->scope = ctx->scope->outer) {
    if (!ctx->trace) continue;
    luna_trace_event e = li_trace_start(ctx, LUNA_TRACE_SCOPE_END, ctx->scope->name, ctx->scope);
    e.start = ctx->scope->start;
    li_trace_send(ctx, e);
  }
}
LI_FN void li_trace_begin(luna_ctx *ctx, const char *name) {
  li_trace_leave(ctx, NULL);
  if (ctx->trace) li_trace_send(ctx, li_trace_start(ctx, LUNA_TRACE_BEGIN, name, NULL));
}

/* Returns the flops of an op's products, forward. */
LI_FN double li_op_flops(const luna_op *op) {
  const luna_tensor *a = op->in[0], *b = op->in[1], *c = op->in[2];
  const double count = (double)luna_count(a), out = (double)luna_count(op->out[0]);
  double pairs;
  switch (op->kind) {
    case LUNA_OP_MATMUL: return 2 * out * (double)op->arg.matmul.k;
    case LUNA_OP_LINEAR: return 2 * out * (double)li_last(a);
    case LUNA_OP_LINEAR_CROSS_ENTROPY: return 2 * (double)li_rows(a) * (double)luna_count(b);
    case LUNA_OP_FEED_FORWARD:
      return 2 * (double)li_rows(a) * (double)(luna_count(b) + luna_count(op->in[3]) + luna_count(op->in[6]));
    case LUNA_OP_SOFTMAX_ATTENTION: /* The sequences of a ragged batch count as equally long. */
      pairs = (double)li_rows(a) * (double)li_rows(b) / (double)li_max(op->arg.attention.batch, 1);
      return 2 * pairs * (double)(li_last(a) + li_last(op->in[op->inputs - 1])) * (op->arg.attention.causal ? 0.5 : 1);
    case LUNA_OP_UNPACK: return 4 * count * (double)(b->shape[1] * b->shape[2]);
    case LUNA_OP_CAUSAL_PRODUCT: return 4 * count * (double)li_last(c) / (double)op->arg.causal.heads;
    case LUNA_OP_CAUSAL_LUNA: case LUNA_OP_FORGETTING_LUNA:
      return 8 * count * (double)li_last(op->in[3]) / (double)op->arg.causal.heads;
    case LUNA_OP_SHORT_CONVOLUTION: return 2 * count * (double)li_last(b);
    default: return 0;
  }
}

/* Returns the bytes that an op reads and writes. Forward these are all inputs and results; backward, the gradients of
   both and the data that it reads. */
LI_FN double li_op_bytes(const luna_op *op, bool backward) {
  const int reads = li_ops[op->kind].reads;
  double floats = 0;
  for (int i = 0; i < op->outputs; i++)
    floats += (double)luna_count(op->out[i]) * (1 + (backward && reads & LUNA_READS_OUT(i)));
  for (int i = 0; i < op->inputs; i++) {
    const luna_tensor *t = op->in[i];
    const bool table = op->kind == LUNA_OP_EMBEDDING && i == 0; /* Only rows are read */
    const double count = (double)luna_count(table ? op->out[0] : t);
    if (!t) continue;
    if (!backward || reads & LUNA_READS_IN(i)) floats += count;
    if (backward && t->needs_grad) floats += count * (2 - (op->sets >> i & 1));
  }
  return floats * (double)sizeof(float) + (double)op->kept_size;
}

LI_FN luna_status li_op_call(luna_op *op, bool backward) {
  luna_ctx *ctx = op->ctx;
  const luna_op_functions *functions = &ctx->backend->op[op->kind];
  luna_status (*const call)(luna_op *op) = backward ? functions->backward : functions->forward;
  if (!ctx->trace) return call(op);

  luna_trace_event e = li_trace_start(ctx, backward ? LUNA_TRACE_BACKWARD : LUNA_TRACE_FORWARD,
                                      luna_op_name(op->kind), op->own->scope);
  e.bytes = li_op_bytes(op, backward);
  e.flops = li_op_flops(op) * (backward ? 2 : 1);
  e.in = op->in;
  e.inputs = op->inputs;
  e.out = op->out;
  e.outputs = op->outputs;
  const luna_status status = call(op);
  li_trace_send(ctx, e);
  return status;
}

/* ----------------
   >>impl_tensors: tensors, scopes, and the tape
   Tensors come first, then scopes, which release what is no longer needed, reading and writing, building an op, and
   backward. An op is built on the caller's stack (li_build, li_start). li_finish takes its outputs, what it keeps and
   its workspace from the step's memory, runs it, and puts it on the tape if a gradient may be wanted; a failure undoes
   everything. luna_backward walks the tape back. li_op_state and li_tensor_state (>>impl_context) are what it knows of
   ops and tensors. Guarded by tests/engine: ops.c, scopes.c, recompute.c and memory.c.
   ---------------- */
/* Every op calls it, so it is not compiled for size. */
int64_t luna_count(const luna_tensor *t) {
  if (t) return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
  return 0;
}

/* Returns the elements of a shape, or -1 if its rank or a size is invalid or they are too many. In that check 0 counts
   as 1, so that no product of axes overflows. */
LI_HOT int64_t li_shape_count(int rank, const int64_t *shape) {
  int64_t count = 1, bound = 1;
  if (rank < 0 || rank > LUNA_MAX_RANK || (rank > 0 && !shape)) return -1;
  for (int a = 0; a < rank; a++) {
    if (shape[a] < 0 || (bound = li_checked(bound, li_max(shape[a], 1))) < 0) return -1;
    count *= shape[a];
  }
  return count;
}

LI_HOT void li_tensor_set(luna_tensor *t, luna_ctx *ctx, int rank, const int64_t *shape) {
  li_clear(t, sizeof *t);
  t->rank = rank;
  for (int a = 0; a < LUNA_MAX_RANK; a++) t->shape[a] = a < rank ? shape[a] : 1;
  t->device = ctx->backend->device;
  t->ctx = ctx;
  t->own = &ctx->none;
}

/* Returns a tensor of the step without data, or null if there is no memory. */
LI_HOT luna_tensor *li_tensor_take(luna_ctx *ctx, int rank, const int64_t *shape) {
  li_mark *step = &ctx->step;
  void *memory;
  luna_tensor *t;
  if (ctx->bump) {
    if (!li_bump_take(ctx->bump, false, sizeof *t, &memory)) return NULL;
    li_tensor_set(t = (luna_tensor *)memory, ctx, rank, shape);
    return t;
  }
  if (!step->slab || step->slab_used == LI_SLAB) {
    li_slab **next = step->slab ? &step->slab->next : &ctx->slabs;
    if (!*next) {
      if (!li_persist(ctx, sizeof(li_slab), false, &memory)) return NULL;
      *next = (li_slab *)memory;
      ctx->slabs_end = ctx->arena[0].persistent_bytes;
    }
    step->slab = *next;
    step->slab_used = 0;
  }
  t = &step->slab->of_step[ctx->begins % 2][step->slab_used];
  li_tensor_set(t, ctx, rank, shape);
  t->own = &step->slab->state[ctx->begins % 2][step->slab_used++];
  li_clear(t->own, sizeof *t->own);
  t->own->older = step->made;
  return step->made = t;
}

LI_FN luna_tensor li_like(luna_ctx *ctx, int rank, const int64_t *shape) {
  luna_tensor t;
  li_tensor_set(&t, ctx, shape && rank > 0 && rank <= LUNA_MAX_RANK ? rank : 0, shape);
  return t;
}
LI_FN luna_tensor *li_fail_shape(luna_ctx *ctx, const char *name, int rank, const int64_t *shape) {
  const luna_tensor like = li_like(ctx, rank, shape);
  if (rank < 0 || rank > LUNA_MAX_RANK)
    return li_fail(ctx, LUNA_ERROR_VALUE_RANGE, name, "rank", (int64_t)rank, (int64_t)0, (int64_t)LUNA_MAX_RANK);
  return li_fail(ctx, LUNA_ERROR_SHAPE, name, "the shape", &like, (int64_t)rank, LI_MAX_COUNT);
}

LI_HOT bool li_data_take(luna_tensor *t) {
  t->own->data_piece = li_piece_take(t->ctx, li_bytes(luna_count(t)));
  if (t->own->data_piece) t->data = (float *)li_piece_at(t->ctx, t->own->data_piece);
  return t->own->data_piece != NULL;
}

/* Returns a tensor of the step with values not set. Returns null, without a sentence, if there is no memory or the
   shape is invalid. */
LI_HOT luna_tensor *li_tensor_make(luna_ctx *ctx, int rank, const int64_t *shape) {
  const int64_t count = li_shape_count(rank, shape);
  luna_tensor *t = NULL;
  void *data;
  if (count >= 0) t = li_tensor_take(ctx, rank, shape);
  if (!t) return NULL;
  if (ctx->bump) {
    if (!li_bump_take(ctx->bump, true, li_bytes(count), &data)) return NULL;
    t->data = (float *)data;
    return t;
  }
  if (count > 0 && !li_data_take(t)) return NULL;
  /* Adding to null is undefined. */
  if (count == 0 && !ctx->options.measure) t->data = (float *)(void *)ctx;
  return t;
}

LI_HOT luna_tensor *li_base(luna_tensor *t) { return (luna_tensor *)(uintptr_t)li_owner(t); }

/* --- Scopes --- */
LI_HOT void li_release(luna_tensor *t) {
  if (!t->own->data_piece) return;
  li_piece_give(t->ctx, &t->own->data_piece);
  t->data = NULL;
  t->own->released = true;
}
/* Ends a tensor whose step is over or has gone back to where memory ended at `end`. */
LI_HOT void li_tensor_end(luna_tensor *t, size_t end) {
  if (t->own->data_piece && t->own->data_piece->place < end) li_release(t);
  t->data = t->grad = NULL;
  t->base = NULL;
  t->own->maker = NULL;
  li_clear(&t->own->cut, sizeof t->own->cut);
  t->own->counted = 0;
  t->own->data_piece = NULL;
  t->needs_grad = false;
  t->own->released = t->own->ended = true;
}

/* Marks what backward reads. A cheap op also keeps its small inputs, so that its result can be computed again,
   except inputs made from nothing, such as sinusoids. */
LI_HOT void li_op_saves(luna_op *op) {
  for (int i = 0; i < op->inputs; i++) {
    luna_tensor *in = li_base(op->in[i]);
    if (!in) continue;
    in->own->last_reader = op;
    in->own->saved = in->own->saved || (li_ops[op->kind].reads & LUNA_READS_IN(i)) ||
                (li_ops[op->kind].cheap && !(in->own->maker && in->own->maker->inputs == 0) &&
                 luna_count(op->in[i]) <= luna_count(op->out[0]) / 2);
  }
  for (int i = 0; i < op->outputs; i++)
    if (li_ops[op->kind].reads & LUNA_READS_OUT(i)) op->out[i]->own->saved = true;
}

/* Returns how many cheap ops in a row compute an op's result again from existing data. Returns 0 if none do or there
   are too many: the limit keeps backward's time linear in the tape and its stack small. */
#define LI_MAX_DEPTH 16
LI_HOT uint8_t li_op_depth(const luna_op *op) {
  int depth = 1;
  if (!li_ops[op->kind].cheap) return 0;
  for (int i = 0; i < op->inputs; i++) {
    const luna_tensor *in = li_base(op->in[i]);
    if (!in || in->parameter || (in->own->saved && !in->own->released)) continue;
    if (!in->own->maker || in->own->maker->own->depth == 0) return 0;
    if (depth <= in->own->maker->own->depth) depth = in->own->maker->own->depth + 1;
  }
  return (uint8_t)(depth <= LI_MAX_DEPTH ? depth : 0);
}

/* A luna_scope holds how far its context had come when it began. */
typedef struct li_scope {
  luna_ctx *ctx;
  luna_tensor *made;
  luna_op *tape;
  size_t used[2];
  uint32_t begins;
  bool recompute;
  const luna_trace_scope *outer; /* The traced outer scope */
} li_scope;
typedef char li_scope_size[sizeof(li_scope) <= sizeof(luna_scope) ? 1 : -1];
LI_HOT li_scope li_scope_of(const luna_scope *scope) {
  li_scope s;
  memcpy(&s, scope, sizeof s);
  return s;
}

LUNA_API luna_scope luna_scope_begin_as(luna_ctx *ctx, const char *name, bool recompute) {
  luna_scope scope;
  li_scope s;
  memset(&s, 0, sizeof s);
  s.recompute = recompute;
  if (ctx) {
    s.ctx = ctx;
    s.made = ctx->step.made;
    s.tape = ctx->tape;
    s.begins = ctx->begins;
    ctx->recomputing = ctx->recomputing || recompute;
    if (ctx->bump)
      for (int i = 0; i < 2; i++) s.used[i] = ctx->bump->part[i].used;
    s.outer = ctx->scope;
    if (ctx->trace) li_trace_enter(ctx, name ? name : "scope");
  }
  memset(&scope, 0, sizeof scope);
  memcpy(&scope, &s, sizeof s);
  return scope;
}
/* Returns the scope's oldest op, or null. */
LI_HOT luna_op *li_scope_first(li_scope scope) {
  luna_op *first = NULL;
  for (luna_op *op = scope.ctx->tape; op && op != scope.tape; op = op->own->previous) first = op;
  return first;
}
/* Returns whether a scope's end leaves alone a tensor that was made inside. */
LI_HOT bool li_scope_leaves(const luna_tensor *t, luna_tensor *const *results, int count) {
  while (count > 0 && li_base(results[count - 1]) != t) count--;
  return count > 0 || t->own->keep_data;
}
/* Releases the results that can be computed again. The oldest comes first, so that each counts what the ones before it
   need. */
LI_HOT void li_scope_depths(li_scope scope, luna_tensor *const *results, int count) {
  for (luna_op *op = li_scope_first(scope); op; op = op->own->next) {
    op->own->depth = li_op_depth(op);
    if (op->own->depth > 0 && !scope.recompute) {
      for (int i = 0; i < op->outputs; i++)
        if (!li_scope_leaves(op->out[i], results, count)) li_release(op->out[i]);
    }
  }
}

/* The scope's ops will run again, and so will those of scopes that began before it and ended inside. What they kept is
   released, and what they read from outside stays. */
LI_FN void li_scope_forget(li_scope scope) {
  luna_op *first = li_scope_first(scope);
  for (luna_op *op = scope.ctx->tape; op && first && op->own->number >= first->own->number; op = op->own->previous)
    if (op->own->recompute_from && op->own->recompute_from->own->number < first->own->number)
      first = op->own->recompute_from;
  for (luna_op *op = first; op; op = op->own->next) {
    li_piece_give(scope.ctx, &op->own->kept_piece);
    op->kept = NULL;
    for (int i = 0; i < op->inputs; i++) {
      luna_tensor *in = li_base(op->in[i]);
      if (in && (!in->own->maker || in->own->maker->own->number < first->own->number)) in->own->saved = true;
    }
  }
  if (first) scope.ctx->tape->own->recompute_from = first;
}

/* This is for streams only. On a device, or while recording, results move only when the outermost scope ends. The
   newest recorded op then makes its result at the new place; it reads nothing there, or is elementwise. */
LI_FN luna_tensor *li_bump_end(li_scope scope, luna_tensor *x) {
  li_bump *b = scope.ctx->bump;
  char *start = b->part[0].start + scope.used[0];
  const size_t bytes = li_bytes(luna_count(x));
  const bool device = li_on_device(scope.ctx), records = b->records;
  void *memory;
  if (!x || ((device || records) && scope.used[1] > 0)) return x;
  b->part[1].used = scope.used[1];
  if (!records) {
    b->part[0].used = scope.used[0];
    if ((uintptr_t)x < (uintptr_t)start || (uintptr_t)x >= (uintptr_t)(b->part[0].start + b->part[0].size)) return x;
    (void)li_bump_take(b, false, sizeof *x, &memory);
    x = (luna_tensor *)memmove(memory, x, sizeof *x);
    x->base = NULL;
  }
  void *data = x->data;
  (void)li_bump_take(b, true, bytes, &memory);
  x->data = (float *)memory;
  if (!memory || memory == data) return x;
  if (!device) {
    memmove(memory, data, bytes);
    return x;
  }
  const luna_status status = scope.ctx->backend->copy(scope.ctx, memory, data, bytes, 0);
  if (li_backend_result(scope.ctx, "luna_stream", status) != LUNA_OK) return NULL;
  return x;
}

/* Releases what the scope made, except results, kept tensors and what backward reads. */
LI_FN luna_tensor *li_scope_release(li_scope scope, luna_tensor *const *results, int count) {
  luna_ctx *ctx = scope.ctx;
  const bool taped = ctx && ctx->training && !ctx->paused && !ctx->differentiated;
  if (!results || count < 1) return NULL;
  if (!ctx || ctx->status != LUNA_OK) return results[0];
  if (ctx->bump) return li_bump_end(scope, results[0]);
  if (scope.begins != ctx->begins) return results[0];
  if (taped && scope.recompute) li_scope_forget(scope);
  else if (taped) li_scope_depths(scope, results, count);
  for (luna_tensor *t = ctx->step.made; t && t != scope.made; t = t->own->older) {
    const luna_op *maker = t->own->maker;
    const bool again = maker && (scope.recompute || maker->own->depth > 0);
    const bool constant = ctx->recomputing && !maker && t->own->last_reader;
    if (!t->own->data_piece || li_scope_leaves(t, results, count)) continue;
    if (taped && (t->own->saved || constant) && !again) t->own->internal = true;
    else li_release(t);
  }
  if (taped && scope.recompute) li_scope_depths(scope, results, count);
  return results[0];
}

LUNA_API luna_tensor *luna_scope_end(luna_scope began, luna_tensor *const *results, int count) {
  const li_scope scope = li_scope_of(&began);
  if (scope.ctx && scope.begins == scope.ctx->begins) li_trace_leave(scope.ctx, scope.outer);
  return li_scope_release(scope, results, count);
}
LI_FN luna_tensor *li_result(luna_scope scope, luna_tensor *x) { return luna_scope_end(scope, &x, 1); }
LI_FN luna_tensor *li_results(luna_scope scope, luna_tensor *x, luna_tensor *p) {
  luna_tensor *results[2] = { x, p };
  return luna_scope_end(scope, results, 2);
}

/* Ends a scope that continues. The next end skips what is older than both results, so a model's time grows linearly
   with its layers, not quadratically. */
LI_FN luna_tensor *li_results_so_far(luna_scope *scope, luna_tensor *x, luna_tensor *p) {
  li_scope s = li_scope_of(scope);
  luna_tensor *results[2] = { x, p };
  x = li_scope_release(s, results, 2);
  if (!x || !s.ctx || s.recompute || s.ctx->bump) return x;
  const luna_tensor *of_x = li_base(x), *of_p = p ? li_base(p) : of_x;
  luna_tensor *made = s.ctx->step.made;
  luna_op *tape = s.ctx->tape;
  for (luna_tensor *t = made; t && t != s.made; t = t->own->older)
    if (t == of_x || t == of_p) made = t->own->older;
  for (luna_op *op = tape; op && op != s.tape; op = op->own->previous)
    if (op == of_x->own->maker || op == of_p->own->maker) tape = op->own->previous;
  s.made = made;
  s.tape = tape;
  memcpy(scope, &s, sizeof s);
  return x;
}
LI_FN luna_tensor *li_result_so_far(luna_scope *scope, luna_tensor *x) {
  return li_results_so_far(scope, x, NULL);
}
/* Fails and returns true if a tensor's data were released, as those of earlier steps are. */
LI_HOT bool li_is_released(const luna_tensor *t, const char *name) {
  if (!t || !li_owner(t)->own->released) return false;
  li_fail(t->ctx, LUNA_ERROR_RELEASED, name, t);
  return true;
}
LUNA_API luna_tensor *luna_keep(luna_tensor *t) {
  if (!t) return NULL;
  if (li_is_released(t, __func__)) return NULL;
  li_base(t)->own->keep_data = true;
  return t;
}

LUNA_API luna_tensor *luna_tensor_new(luna_ctx *ctx, const float *values, int rank, const int64_t *shape) {
  const int64_t count = li_shape_count(rank, shape);
  if (!ctx) return NULL;
  if (count < 0) return li_fail_shape(ctx, __func__, rank, shape);
  const li_mark mark = li_step_mark(ctx);
  const size_t bytes = li_bytes(count);
  luna_tensor *t = li_tensor_make(ctx, rank, shape);
  if (!t) {
    li_step_rewind(ctx, mark);
    return li_fail_op_memory(ctx, __func__, bytes);
  }
  if (!li_computes(ctx) || count == 0) return t;
  luna_status status;
  if (values) status = ctx->backend->copy(ctx, t->data, values, bytes, 1);
  else status = ctx->backend->zero(ctx, t->data, bytes);
  if (status == LUNA_OK) return t;
  return li_fail_backend(ctx, __func__, status);
}

LUNA_API luna_tensor *luna_tensor_full(luna_ctx *ctx, float value, int rank, const int64_t *shape) {
  return luna_add_scalar(luna_tensor_new(ctx, NULL, rank, shape), value);
}

LUNA_API luna_tensor *luna_require_grad(luna_tensor *t) {
  if (t && t->base && !t->needs_grad) t = luna_scale(t, 1); /* Not its owner's gradient */
  if (!t || (t->own->ended && li_is_released(t, __func__))) return NULL;
  t->needs_grad = t->own->keep_grad = li_base(t)->own->keep_grad = true;
  return t;
}

/* Reports the steps that optimisers skipped. It waits for the device only when a read does so anyway, and asks each
   optimiser only if steps were skipped. */
LI_FN void li_look_at_optimizers(luna_ctx *ctx, bool skipped);
LI_FN void li_look(luna_ctx *ctx) {
  if (!ctx->options.log && !ctx->unread) return;
  const luna_step_state now = li_state_of(ctx, ctx->state);
  const bool skipped = now.skipped != ctx->reported;
  li_look_at_optimizers(ctx, skipped);
  ctx->reported = now.skipped;
  ctx->unread = false;
  if (skipped)
    li_note(ctx, "luna_optimizer_step: %d steps skipped up to step %d: the loss or a gradient was not finite or too "
            "large", (int64_t)now.skipped, (int64_t)now.step);
}

/* `from` is data, or a gradient, null until backward reaches it. */
LI_FN luna_status li_read_floats(const luna_tensor *t, const float *from, float *out, const char *name, bool grad) {
  const size_t bytes = li_bytes(luna_count(t));
  if (!t) return LUNA_BAD_ARGUMENT;
  if (grad ? t->own->ended : li_owner(t)->own->released)
    return li_fail_status(t->ctx, LUNA_ERROR_RELEASED, name, t);
  if (!out) return li_fail_status(t->ctx, LUNA_ERROR_NULL_ARGUMENT, name, "out");
  if (!li_computes(t->ctx)) {
    memset(out, 0, bytes);
    return LUNA_OK;
  }
  if (!from && bytes && grad) return li_fail_status(t->ctx, LUNA_ERROR_NO_GRAD, t);
  if (!from && bytes) return li_fail_status(t->ctx, LUNA_ERROR_RELEASED, name, t);
  li_look(t->ctx);
  return t->ctx->backend->copy(t->ctx, out, from, bytes, 2);
}
LI_FN luna_status li_read_data(const luna_tensor *t, float *out, const char *name) {
  return li_read_floats(t, t ? t->data : NULL, out, name, false);
}
LUNA_API luna_status luna_read(const luna_tensor *t, float *out) { return li_read_data(t, out, __func__); }
LUNA_API luna_status luna_read_grad(const luna_tensor *t, float *out) {
  const float *grad = NULL;
  if (t && li_owner(t)->grad) grad = li_owner(t)->grad + t->own->offset;
  return li_read_floats(t, grad, out, __func__, true);
}
LUNA_API float luna_item(const luna_tensor *t) {
  float value = NAN;
  if (t && luna_count(t) != 1) li_fail(t->ctx, LUNA_ERROR_NOT_ONE_ELEMENT, __func__, t, luna_count(t));
  else if (t && li_read_data(t, &value, __func__) != LUNA_OK) value = NAN;
  return value;
}

/* Finds the first maximum of an axis, where NaN is the greatest. Returns false if the axis is empty. */
LI_HOT bool li_first_max(const float *x, int64_t axis, int64_t stride, int64_t *at) {
  int64_t i;
  for (*at = 0, i = 0; i < axis; i++) {
    if (x[i * stride] > x[*at * stride]) *at = i;
    if (x[i * stride] != x[i * stride]) {
      *at = i;
      break;
    }
  }
  return axis > 0;
}
LUNA_API luna_status luna_argmax(const luna_tensor *x, int32_t *indices) {
  void *memory = NULL;
  if (!x) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = x->ctx;
  const int64_t n = li_last(x), rows = li_rows(x);
  const size_t bytes = li_bytes(luna_count(x));
  const bool computes = li_computes(ctx), copies = li_on_device(ctx);
  if (!li_in(ctx, __func__, "the last axis", n, 1, INT32_MAX)) return ctx->last_status;
  if (!indices && rows > 0) return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "indices");
  if (li_owner(x)->own->released || (computes && !x->data && bytes))
    return li_fail_status(ctx, LUNA_ERROR_RELEASED, __func__, x);

  const li_mark mark = li_step_mark(ctx);
  if (copies && !li_step(ctx, bytes, false, &memory)) return li_fail_memory(ctx, __func__, bytes);
  luna_status status = LUNA_OK;
  if (copies && computes && bytes) status = li_read_data(x, (float *)memory, __func__);
  const float *row = copies ? (const float *)memory : x->data;
  for (int64_t r = 0; r < rows && status == LUNA_OK; r++) {
    int64_t at = 0;
    if (computes) (void)li_first_max(row, n, 1, &at);
    indices[r] = (int32_t)at;
    if (computes) row += n;
  }
  li_step_rewind(ctx, mark);
  return status;
}

LUNA_API luna_status luna_write(luna_tensor *t, const float *values) {
  const size_t bytes = li_bytes(luna_count(t));
  if (!t) return LUNA_BAD_ARGUMENT;
  luna_tensor *owner = li_base(t);
  if (owner->own->borrowed) return li_fail_status(t->ctx, LUNA_ERROR_WRITE_BORROWED, t);
  if (!values && bytes) return li_fail_status(t->ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "values");
  owner->own->given = true;
  if (!li_computes(t->ctx)) return LUNA_OK;
  if (owner->own->released || (!t->data && bytes)) return li_fail_status(t->ctx, LUNA_ERROR_RELEASED, __func__, t);
  if (owner->parameter) t->ctx->writes++;
  return t->ctx->backend->copy(t->ctx, t->data, values, bytes, 1);
}

/* Writes what `make` computes from `from` on the host. */
LI_FN luna_status li_write_made(luna_tensor *t, const char *name, void (*make)(float *to, const void *from),
                                const void *from) {
  const li_mark mark = li_step_mark(t->ctx);
  float *values = (float *)li_step_host(t->ctx, name, li_bytes(luna_count(t)));
  if (!values) return LUNA_OUT_OF_MEMORY;
  if (li_computes(t->ctx)) make(values, from);
  const luna_status status = luna_write(t, values);
  li_step_rewind(t->ctx, mark);
  return status;
}

/* --- Building an op --- */
typedef struct li_build {
  luna_op op;
  li_op_state state;
  li_mark mark;
  const char *name;
  bool failed; /* Integers failed, already reported */
  int64_t counted;
} li_build;

LI_HOT void li_start_in(li_build *s, luna_ctx *ctx, luna_op_kind kind, const char *name) {
  li_clear(&s->op, sizeof s->op);
  s->name = name;
  s->failed = false;
  if (ctx->bump) {
    s->mark.bytes[0] = ctx->bump->part[0].used;
    s->mark.bytes[1] = ctx->bump->part[1].used;
  } else s->mark = li_step_mark(ctx);
  li_clear(&s->state, sizeof s->state);
  s->op.own = &s->state;
  s->op.kind = kind;
  s->op.ctx = ctx;
  s->op.outputs = 1;
  s->state.scope = ctx->scope;
}

/* The first `required` inputs must not be null. */
LI_HOT bool li_start(li_build *s, luna_op_kind kind, const char *name, luna_tensor *const *in, int required,
                     int count) {
  static const char *const numbers[] = { "the first input", "the second input", "the third input",
                                         "the fourth input", "the fifth input" };
  luna_ctx *ctx = NULL;
  for (int i = 0; i < count && !ctx; i++)
    if (in[i]) ctx = in[i]->ctx;
  if (!ctx) return false;
  li_start_in(s, ctx, kind, name);
  s->op.inputs = count;
  for (int i = 0; i < count; i++) {
    s->op.in[i] = in[i];
    if (!ctx->bump && in[i] && in[i]->ctx != ctx) { /* Both contexts report it */
      li_fail(in[i]->ctx, LUNA_ERROR_OTHER_CONTEXT, name, (int64_t)i);
      return li_refuse(ctx, LUNA_ERROR_OTHER_CONTEXT, name, (int64_t)i);
    }
    if (!ctx->bump && li_is_released(in[i], name)) return false;
    if (i < required && !in[i]) return li_refused(li_fail_null(ctx, name, numbers[i]));
  }
  return true;
}

/* Returns whether no input is null. If one is, or they are too many, the context of the first other input fails. */
LI_FN bool li_all(luna_tensor *const *x, int count, const char *name) {
  luna_ctx *ctx = NULL;
  int missing = 0;
  for (int i = 0; x && i < count && i < LUNA_MAX_INPUTS; i++) {
    missing += !x[i];
    if (!ctx && x[i]) ctx = x[i]->ctx;
  }
  if (ctx && count > LUNA_MAX_INPUTS)
    li_fail(ctx, LUNA_ERROR_TOO_MANY_TENSORS, name, (int64_t)count, (int64_t)LUNA_MAX_INPUTS);
  else if (ctx && missing) li_fail_null(ctx, name, "one of the tensors");
  return ctx && !missing && count <= LUNA_MAX_INPUTS;
}

/* Copies host integers into the step. Returns null if there is no memory or the backend failed. */
LI_FN const int32_t *li_integers_copy(li_build *s, const int32_t *values, int64_t count) {
  luna_ctx *ctx = s->op.ctx;
  const size_t bytes = (size_t)count * sizeof(int32_t);
  void *memory;
  if (!li_step(ctx, (size_t)li_max(1, count) * sizeof(int32_t), li_on_device(ctx), &memory)) {
    li_fail_op_memory(ctx, s->name, bytes);
    return NULL;
  }
  if (!memory) return values; /* A measuring device */
  luna_status status = LUNA_OK;
  if (!ctx->options.measure) status = ctx->backend->copy(ctx, memory, values, bytes, 1);
  else if (count > 0) memcpy(memory, values, bytes); /* An op's query reads them. */
  if (status == LUNA_OK) return (const int32_t *)memory;
  li_fail_backend(ctx, s->name, status);
  return NULL;
}

/* Does the same after checking that each is in [min, max]. A stream's were checked before and are in backend memory. */
LI_FN const int32_t *li_integers(li_build *s, const int32_t *values, int64_t count, int64_t min, int64_t max,
                                 const char *what) {
  luna_ctx *ctx = s->op.ctx;
  if (!values || s->failed) return NULL;
  if (ctx->bump) return values;
  s->failed = true;
  for (int64_t i = 0; i < count; i++)
    if (values[i] < min || values[i] > max) {
      li_fail(ctx, LUNA_ERROR_ELEMENT_RANGE, s->name, what, i, (int64_t)values[i], min, max);
      return NULL;
    }
  const int32_t *kept = li_integers_copy(s, values, count);
  s->failed = kept == NULL;
  return kept;
}

LI_FN luna_tensor *li_abandon(li_build *s) {
  li_step_rewind(s->op.ctx, s->mark);
  return NULL;
}
LI_FN luna_tensor *li_op_no_memory(li_build *s, size_t bytes) {
  li_fail_op_memory(s->op.ctx, s->name, bytes);
  return li_abandon(s);
}

/* A result without elements is not computed, because it may have 2^40 empty rows. */
LI_HOT bool li_is_empty(const luna_op *op) { return luna_count(op->out[0]) == 0; }
LI_HOT bool li_is_run(const luna_op *op) { return li_computes(op->ctx) && !li_is_empty(op); }

/* Runs an op with a workspace at the step's end. Returns false if there is no memory. */
LI_HOT bool li_op_run_in_step(luna_op *op, bool backward, luna_status *status) {
  luna_ctx *ctx = op->ctx;
  const li_mark mark = li_step_mark(ctx);
  const bool good = li_step(ctx, backward ? op->backward_workspace_size : op->workspace_size, true, &op->workspace);
  if (good && li_is_run(op)) *status = li_op_call(op, backward);
  li_step_rewind(ctx, mark);
  return good;
}

/* Runs an op's forward with memory for what it keeps and its workspace. If this is false, *status has the failure, or
   LUNA_OK if there is no memory. */
LI_HOT bool li_op_run(luna_op *op, luna_status *status) {
  luna_ctx *ctx = op->ctx;
  li_piece *workspace = NULL;
  *status = LUNA_OK;
  if (op->kept_size > 0 && !op->own->kept_piece) {
    if ((op->own->kept_piece = li_piece_take(ctx, op->kept_size)) == NULL) return false;
    op->kept = li_piece_at(ctx, op->own->kept_piece);
  }
  if (op->workspace_size > 0 && !li_pieces_split(ctx))
    return li_op_run_in_step(op, false, status) && *status == LUNA_OK;
  op->workspace = NULL;
  if (op->workspace_size > 0) {
    if ((workspace = li_piece_take(ctx, op->workspace_size)) == NULL) return false;
    op->workspace = li_piece_at(ctx, workspace);
  }
  if (li_is_run(op)) *status = li_op_call(op, false);
  li_piece_give(ctx, &workspace);
  return *status == LUNA_OK;
}

/* This is li_finish in a stream, whose tensors stay until their memory is taken again. */
LI_FN luna_tensor *li_bump_finish(li_build *s, int rank, const int64_t *shape) {
  luna_op *op = &s->op;
  li_bump *b = op->ctx->bump;
  const luna_op_functions *functions = &op->ctx->backend->op[op->kind];
  op->dropout = op->last_dropout = 0;
  if ((op->out[0] = li_tensor_make(op->ctx, rank, shape)) == NULL) return li_op_no_memory(s, sizeof(luna_tensor));
  if (luna_count(op->out[0]) == 0) return op->out[0];
  functions->query(op);
  const size_t used = b->part[1].used;
  if (op->workspace_size > 0 && !li_bump_take(b, true, op->workspace_size, &op->workspace))
    return li_op_no_memory(s, op->workspace_size);
  b->part[1].used = used;
  if (b->records) {
    if (b->count == b->room) return li_op_no_memory(s, sizeof *op);
    if (b->ops) {
      b->ops[b->count] = *op;
      b->ops[b->count].own = NULL; /* `s` ends before the op runs again. */
    }
    b->count++;
  }
  const luna_status status = li_computes(op->ctx) ? functions->forward(op) : LUNA_OK;
  if (status == LUNA_OK) return op->out[0];
  li_fail_backend(op->ctx, s->name, status);
  return li_abandon(s);
}

/* A device's dropout knows no parts, so each part has its own op numbers there. */
LI_FN uint32_t li_part_masks(const luna_ctx *ctx) {
  if (ctx->shares && li_on_device(ctx)) return (uint32_t)ctx->part.first << 16;
  return 0;
}
/* Returns the part of a batch that an op's result is: that of the first input that is a part. Rows that an embedding
   gathers are in any order, so its result is no part. */
LI_HOT li_cut li_cut_made(const luna_op *op) {
  const li_cut none = { 0, 0 };
  if (op->kind == LUNA_OP_EMBEDDING) return none;
  for (int i = 0; i < op->inputs; i++)
    if (op->in[i] && op->in[i]->own->cut.own > 0) return op->in[i]->own->cut;
  return none;
}
LI_HOT bool li_is_buildable(const li_build *s, int rank, const int64_t *shape) {
  luna_ctx *ctx = s->op.ctx;
  if (s->failed) return false;
  if (!ctx->backend->op[s->op.kind].forward)
    return li_refuse(ctx, LUNA_ERROR_NO_OP, s->name, luna_op_name(s->op.kind));
  for (int i = 0; i < s->op.inputs; i++)
    if (li_is_released(s->op.in[i], s->name)) return false;
  return li_shape_count(rank, shape) >= 0 || li_refused(li_fail_shape(ctx, s->name, rank, shape));
}
LI_HOT void li_tape(luna_op *op) {
  luna_ctx *ctx = op->ctx;
  li_op_saves(op);
  op->own->depth = li_op_depth(op);
  for (int i = 0; i < op->outputs; i++) op->out[i]->own->maker = op;
  op->own->previous = ctx->tape;
  if (ctx->tape) {
    op->own->number = ctx->tape->own->number + 1;
    ctx->tape->own->next = op;
  }
  ctx->tape = op;
}

/* Takes the output and, if asked, a second one, `extra`, with `last` as its last axis. Then runs the op and puts it on
   the tape. */
LI_HOT luna_tensor *li_finish_two(li_build *s, int rank, const int64_t *shape, luna_tensor **extra, int64_t last) {
  luna_ctx *ctx = s->op.ctx;
  luna_op *op = &s->op;
  luna_status status;
  const bool tapes = LI_TRAINS && ctx->training && !ctx->paused;
  bool wanted = false;
  void *memory;
  if (ctx->bump) return li_bump_finish(s, rank, shape);
  if (!li_is_buildable(s, rank, shape)) return li_abandon(s);
  if (tapes)
    for (int i = 0; i < op->inputs; i++) wanted = wanted || (op->in[i] && op->in[i]->needs_grad);
  const bool record = wanted || (tapes && op->inputs == 0); /* An op without inputs may run again too. */
  if (record) {
    const size_t size = sizeof *op + sizeof *op->own;
    if (!li_step_small(ctx, size, &memory)) return li_op_no_memory(s, size);
    op = (luna_op *)memcpy(memory, op, sizeof *op);
    op->own = (li_op_state *)memcpy(op + 1, &s->state, sizeof s->state);
  }
  op->training = record;
  if (!LI_TRAINS || !ctx->training) op->dropout = op->last_dropout = 0;
  if (op->dropout > 0) op->dropout_op = li_part_masks(ctx) + ctx->dropout_ops++;
  if (op->last_dropout > 0) op->last_dropout_op = li_part_masks(ctx) + ctx->dropout_ops++;
  op->out[0] = li_tensor_make(ctx, rank, shape);
  if (op->out[0] && extra) {
    int64_t other[LUNA_MAX_RANK];
    memcpy(other, shape, (size_t)rank * sizeof *shape);
    other[rank - 1] = last;
    op->out[op->outputs++] = li_tensor_make(ctx, rank, other);
  }
  if (!op->out[op->outputs - 1])
    return li_op_no_memory(s, li_bytes(li_shape_count(rank, shape)));
  for (int i = 0; i < op->outputs; i++) op->out[i]->own->cut = li_cut_made(op);
  if (!li_is_empty(op)) ctx->backend->op[op->kind].query(op);
  if (!li_op_run(op, &status)) {
    li_piece_give(ctx, &op->own->kept_piece);
    if (status == LUNA_OK) return li_op_no_memory(s, op->kept_size + op->workspace_size);
    li_fail_backend(ctx, s->name, status);
    return li_abandon(s);
  }
  for (int i = 0; i < op->outputs; i++) op->out[i]->needs_grad = wanted;
  if (extra) *extra = op->out[1];
  if (record) li_tape(op);
  return op->out[0];
}

LI_HOT luna_tensor *li_finish(li_build *s, int rank, const int64_t *shape) {
  return li_finish_two(s, rank, shape, NULL, 0);
}
/* The result has in[0]'s shape except for the last axis. */
LI_HOT luna_tensor *li_finish_rows(li_build *s, int64_t last) {
  int64_t shape[LUNA_MAX_RANK];
  memcpy(shape, s->op.in[0]->shape, sizeof shape);
  shape[s->op.in[0]->rank - 1] = last;
  return li_finish(s, s->op.in[0]->rank, shape);
}
LI_FN luna_tensor *li_finish_like(li_build *s, const luna_tensor *t) {
  return li_finish(s, t->rank, t->shape);
}

/* --- Backward --- */
#ifndef LUNA_NO_TRAIN
/* Takes a gradient. A new one is zeroed unless `set`. A view has a part of its owner's. */
LI_HOT bool li_grad_take(luna_ctx *ctx, luna_tensor *t, bool set) {
  luna_tensor *owner = li_base(t);
  const size_t bytes = li_bytes(luna_count(owner));
  void *memory = NULL;
  if (!owner->own->has_grad) {
    if (owner->own->maker && !owner->own->keep_grad && !t->own->keep_grad) {
      if ((owner->own->grad_piece = li_piece_take(ctx, bytes)) == NULL) return false;
      memory = li_piece_at(ctx, owner->own->grad_piece);
    } else if (owner->parameter) {
      if (!li_persist(ctx, bytes, true, &memory)) return false;
    } else if (!li_step(ctx, bytes, true, &memory)) return false;
    owner->grad = (float *)memory;
    owner->own->has_grad = true;
    if (memory && !set && ctx->backend->zero(ctx, memory, bytes) != LUNA_OK) return false;
  }
  t->own->has_grad = true;
  if (t->base && owner->grad) t->grad = owner->grad + t->own->offset;
  return true;
}

/* An empty result calls no function. */
LI_HOT int li_op_can(const luna_op *op) { return li_is_empty(op) ? 0 : op->ctx->backend->op[op->kind].can; }
/* Returns bits of the inputs that are the same tensor as in[at], or views of it. */
LI_HOT int li_same_inputs(const luna_op *op, int at) {
  int same = 0;
  for (int i = 0; i < op->inputs; i++)
    if (li_owner(op->in[i]) == li_owner(op->in[at])) same |= 1 << i;
  return same;
}
LI_FN bool li_is_single(const luna_op *op, int at) { return li_same_inputs(op, at) == 1 << at; }

/* Gives results that were released memory again. */
LI_FN bool li_outputs_take(luna_op *op) {
  for (int i = 0; i < op->outputs; i++) {
    luna_tensor *out = op->out[i];
    if (!out->own->released) continue;
    if (!out->own->data_piece && !li_data_take(out)) return false;
    out->own->released = false;
    out->own->recomputed = true;
  }
  return true;
}

/* Counts the readers of everything that must be computed again for a tensor's data. */
LI_HOT bool li_recompute_count(luna_tensor *t, luna_status *status) {
  const luna_tensor *owner = li_base(t);
  luna_op *op = owner->own->maker;
  if (!owner->own->released) return true;
  if (!op) { /* Scopes did not end in order. */
    *status = li_fail_status(owner->ctx, LUNA_ERROR_RELEASED, "luna_backward", owner);
    return false;
  }
  if (op->own->readers++ > 0) return true;
  for (int i = 0; i < op->inputs; i++)
    if (op->in[i] && !li_recompute_count(op->in[i], status)) return false;
  return true;
}
/* After its last reader, releases a tensor that was computed again. */
LI_HOT void li_recompute_read(luna_tensor *t) {
  if (!t || !t->own->maker || t->own->maker->own->readers == 0 || --t->own->maker->own->readers > 0) return;
  if (t->own->data_piece) li_release(t);
  t->data = NULL; /* The result may have its data. */
  t->own->released = true;
}

/* Computes a released tensor's inputs, then its data, in place of the first input's if nothing else reads those. */
LI_HOT bool li_recompute(luna_tensor *t, luna_status *status) {
  luna_tensor *owner = li_base(t), *first = NULL;
  luna_op *op = owner->own->maker, *maker = NULL;
  if (owner->own->released) {
    for (int i = 0; i < op->inputs; i++)
      if (op->in[i] && !li_recompute(op->in[i], status)) return false;
    if (op->inputs > 0) first = li_base(op->in[0]);
    if (first) maker = first->own->maker;
    if (maker && maker->own->readers == 1 && (li_op_can(op) & LUNA_FORWARD_IN_PLACE) &&
        luna_count(first) == luna_count(owner) && li_is_single(op, 0)) {
      owner->own->data_piece = first->own->data_piece;
      owner->data = first->data;
      first->own->data_piece = NULL;
    }
    if (!li_outputs_take(op) || !li_op_run(op, status)) return false;
    for (int i = 0; i < op->inputs; i++) li_recompute_read(li_base(op->in[i]));
  }
  if (t->base && owner->data) t->data = owner->data + t->own->offset;
  return true;
}

/* Computes an input's released data again by cheap ops, each once, and releases what those needed. */
LI_HOT bool li_recompute_data(luna_tensor *t, luna_status *status) {
  luna_op *op = li_base(t)->own->maker;
  const bool good = li_recompute_count(t, status) && li_recompute(t, status);
  if (op) op->own->readers = 0;
  return good;
}

/* Runs the ops of a recomputed scope again, up to `newest`, and releases what no later op and no backward reads. */
LI_FN bool li_scope_again(luna_op *newest, luna_status *status) {
  luna_op *op = newest->own->recompute_from;
  for (;; op = op->own->next) {
    for (int i = 0; i < op->inputs; i++)
      if (op->in[i] && !li_recompute_data(op->in[i], status)) return false;
    if (!li_outputs_take(op) || !li_op_run(op, status)) return false;
    for (int i = 0; i < op->inputs; i++) {
      luna_tensor *in = li_base(op->in[i]);
      if (in && in->own->recomputed && in->own->last_reader == op && !in->own->saved) li_release(in);
    }
    if (op == newest) return true;
  }
}

/* Returns whether backward has reached a recomputed scope. `op` is the scope's newest op. */
LI_HOT bool li_scope_is_reached(const luna_op *op) {
  const luna_op *first = op->own->recompute_from;
  for (; first; op = op->own->previous) {
    for (int i = 0; i < op->outputs; i++)
      if (op->out[i]->own->has_grad) return true;
    if (op == first) return false;
  }
  return false;
}

LI_HOT bool li_is_new(const luna_tensor *t) {
  return t->needs_grad && !t->own->has_grad && t->own->maker && !t->own->keep_grad;
}

/* Releases a result's data after the backward of all its readers, unless the user may want them. */
LI_HOT void li_result_done(luna_tensor *t) {
  if (t->own->keep_data || !t->own->data_piece) return;
  if (t->own->recomputed || t->own->internal) li_release(t);
}
/* Releases what nothing reads after an op's backward: its results' gradients and data, and what it kept. */
LI_HOT void li_op_done(luna_op *op) {
  luna_ctx *ctx = op->ctx;
  li_piece_give(ctx, &op->own->kept_piece);
  for (int i = 0; i < op->outputs; i++) {
    luna_tensor *out = op->out[i];
    li_result_done(out);
    if (out->own->maker == op && !out->own->keep_grad) {
      li_piece_give(ctx, &out->own->grad_piece);
      out->grad = NULL;
      out->own->has_grad = false;
    }
  }
}

/* Returns whether the gradient of an op's result becomes its input's, in place. */
LI_HOT bool li_grad_in_place(const luna_op *op, int i) {
  const int can = li_op_can(op), others = li_same_inputs(op, i) & ~(1 << i);
  return (can & LUNA_GRAD_IN_PLACE(i)) && op->in[i] && op->out[0]->own->grad_piece && li_is_new(op->in[i]) &&
         luna_count(op->in[i]) == luna_count(op->out[0]) &&
         (others & ~(can / LUNA_ADDS_IN_PLACE(0))) == 0;
}

/* Runs a backward with memory for the gradients that it writes, or in place of the result's. */
LI_HOT bool li_op_give(luna_op *op, luna_status *status) {
  const int can = li_op_can(op);
  op->sets = 0;
  for (int i = 0; i < op->inputs; i++)
    if (li_grad_in_place(op, i)) {
      op->in[i]->grad = op->out[0]->grad;
      op->in[i]->own->grad_piece = op->out[0]->own->grad_piece;
      op->in[i]->own->has_grad = true;
      op->out[0]->own->grad_piece = NULL;
    }
  for (int i = 0; i < op->inputs; i++) {
    const bool set = (can & LUNA_SETS_GRAD(i)) && op->in[i] && li_is_new(op->in[i]) && li_is_single(op, i);
    if (set) op->sets |= 1 << i;
    if (op->in[i] && op->in[i]->needs_grad && !li_grad_take(op->ctx, op->in[i], set)) return false;
  }
  return li_op_run_in_step(op, true, status);
}

/* Runs an op's backward if a gradient has reached a result, after computing again what it reads and was released. */
LI_HOT bool li_op_backward(luna_op *op, luna_status *status) {
  const int reads = li_ops[op->kind].reads;
  bool reached = false;
  *status = LUNA_OK;
  for (int i = 0; i < op->outputs; i++) reached = reached || op->out[i]->own->has_grad;
  if (!reached) {
    li_op_done(op);
    return true;
  }
  for (int i = 0; i < op->outputs; i++) {
    if (!li_grad_take(op->ctx, op->out[i], false)) return false;
    if (!(reads & LUNA_READS_OUT(i))) li_result_done(op->out[i]);
  }
  for (int i = 0; i < op->inputs; i++)
    if (op->in[i] && (reads & LUNA_READS_IN(i)) && !li_recompute_data(op->in[i], status)) return false;
  if (!li_op_give(op, status)) return false;
  li_op_done(op);
  return *status == LUNA_OK;
}

LI_FN luna_status li_fail_backward(luna_ctx *ctx, size_t bytes) {
  return li_fail_status(ctx, LUNA_ERROR_BACKWARD_MEMORY, (int64_t)bytes, (int64_t)luna_memory(ctx).current);
}
LI_FN luna_status li_walk_failed(luna_ctx *ctx, const luna_op *op, luna_status status) {
  char name[64];
  size_t bytes = op->backward_workspace_size;
  for (int i = 0; i < op->inputs; i++)
    if (op->in[i] && op->in[i]->needs_grad) bytes += li_bytes(luna_count(op->in[i]));
  if (status == LUNA_OK) return li_fail_backward(ctx, bytes);
  li_print(name, sizeof name, "luna_backward of %s", luna_op_name(op->kind));
  return li_backend_result(ctx, name, status);
}

/* Walks the tape from the newest op back. A recomputed scope runs again when the walk gets to its newest op. */
LI_FN luna_status li_walk_back(luna_tensor *loss) {
  const float one = 1;
  luna_ctx *ctx = loss->ctx;
  luna_status status = LUNA_OK;
  luna_op *again = NULL; /* Oldest op being recomputed */
  if (!li_grad_take(ctx, loss, !loss->base)) return li_fail_backward(ctx, sizeof(float));
  if (li_computes(ctx)) status = ctx->backend->copy(ctx, loss->grad, &one, sizeof one, 1);
  if (li_computes(ctx) && status == LUNA_OK) status = ctx->backend->check(ctx, loss, ctx->state);
  if (status != LUNA_OK) return li_backend_result(ctx, "luna_backward", status);
  for (luna_op *op = ctx->tape; op; op = op->own->previous) {
    if (!again && li_scope_is_reached(op)) {
      again = op->own->recompute_from;
      if (!li_scope_again(op, &status)) return li_walk_failed(ctx, op, status);
    }
    if (!li_op_backward(op, &status)) return li_walk_failed(ctx, op, status);
    if (op == again) again = NULL;
  }
  return LUNA_OK;
}

LI_FN void li_gradients_forget(luna_ctx *ctx);
LUNA_API luna_status luna_write_grad(luna_tensor *t, const float *values) {
  const size_t bytes = li_bytes(luna_count(t));
  if (!t) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = t->ctx;
  if (!t->parameter || !t->needs_grad) return li_fail_status(ctx, LUNA_ERROR_GRAD_OF, t);
  if (!values && bytes) return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "values");
  if (!li_grad_take(ctx, t, true)) return li_fail_memory(ctx, __func__, bytes);
  if (!li_computes(ctx)) return LUNA_OK;
  return li_backend_result(ctx, __func__, ctx->backend->copy(ctx, t->grad, values, bytes, 1));
}

LUNA_API luna_status luna_backward(luna_tensor *loss) {
  if (!loss) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = loss->ctx;
  if (ctx->status != LUNA_OK) return ctx->status;
  if (luna_count(loss) != 1)
    return li_fail_status(ctx, LUNA_ERROR_NOT_ONE_ELEMENT, __func__, loss, luna_count(loss));
  if (li_owner(loss)->own->released) return li_fail_status(ctx, LUNA_ERROR_RELEASED, __func__, loss);
  if (ctx->differentiated) return li_fail_status(ctx, LUNA_ERROR_SECOND_BACKWARD);
  if (!ctx->tape || !loss->needs_grad) return li_fail_status(ctx, LUNA_ERROR_NO_TAPE);
  luna_status status = li_walk_back(loss);
  if (status == LUNA_OK) status = ctx->status;
  ctx->tape = NULL;
  if (status != LUNA_OK) {
    li_gradients_forget(ctx);
    return status;
  }
  ctx->differentiated = true;
  ctx->backwards++;
  return LUNA_OK;
}

#endif /* !LUNA_NO_TRAIN */

/* ----------------
   >>impl_params: named tensors, their first values, and text pairs. A set (luna_params) has its parameters (li_param)
   in a list, and finds them by index or name (li_names). In this order: sets, freezing, first values, values of a file
   or another set, new parameters, inits, text pairs. A new kind of first values is a case of li_first_values. Guarded
   by tests/robust/setup.c, tests/engine/trainer.c and tests/files/checkpoints.c.
   ---------------- */
/* Gives the field, or 0 for a null pointer. */
#define LI_OF(pointer, field) ((pointer) ? (pointer)->field : 0)
#define LI_MAX_PARAM_NAME 1024 /* With its end */
typedef struct li_param {
  struct li_param *next; /* In the set */
  const char *name;
  uint64_t hash;         /* The name's */
  luna_tensor tensor;
  li_tensor_state state; /* The tensor's */
  float *frozen_grad;    /* While it is frozen, these hold the gradient and has_grad, otherwise null and false. */
  bool had_grad;
} li_param;
/* A full map is replaced by one of twice the size. The old one stays as it was, for an init that is undone. */
typedef struct li_names {
  li_param **at;    /* [room], in set order */
  li_param **slots; /* [2 room], probed from the hash; null is free. */
  int64_t room;     /* 0, or a power of two */
} li_names;
typedef struct li_meta { struct li_meta *next; const char *key, *value; } li_meta;

struct luna_params {
  luna_ctx *ctx;
  const luna_params *older;  /* Opened before it */
  li_param *first, *last;
  li_meta *metas, *last_meta;
  li_meta *replaced;         /* Earlier values, newest first */
  li_names names;
  int64_t size;
  int64_t horizon;           /* For causal models this is the longest training sequence, or 0. */
  bool horizon_fixed;        /* Set by a config, this set's or a file's */
  bool horizon_own;          /* By this set's */
  struct luna_lm_state *state; /* It is the newest of its models' states, which training checkpoints save. */
  const luna_params *shared; /* This set reads its values in place; or null. */
  li_sharing sharing;        /* In ctx->sharing, where queued */
  const li_st *filling;      /* While a model is loaded, new parameters take their values from this file. */
};

/* Records the outcome of a call that makes something. The next begin fails with the first failure. A failure inside an
   init belongs to the init. */
LI_FN void li_remember(luna_ctx *ctx, luna_status status) {
  li_failure *f = &ctx->failure;
  if (status == LUNA_OK || f->status != LUNA_OK || ctx->setups > 0) return;
  f->status = status;
  f->id = ctx->error_id;
  memcpy(f->error, ctx->error, sizeof f->error);
}

LI_FN bool li_is_ours(const char *name) { return strncmp(name, "luna.", 5) == 0; }

/* Names and pairs must be UTF-8 to go into a checkpoint. */
LI_FN bool li_is_text(const char *s) {
  const char *end = s + strlen(s);
  while (s < end)
    if (li_st_utf8(&s, end) == LI_ST_BAD) return false;
  return true;
}

LUNA_API luna_params *luna_params_open(luna_ctx *ctx) {
  if (!ctx) return NULL;
  luna_params *params = (luna_params *)li_persist_host(ctx, __func__, sizeof(luna_params));
  li_remember(ctx, params ? LUNA_OK : ctx->last_status);
  if (!params) return NULL;
  params->ctx = ctx;
  params->older = ctx->newest;
  ctx->newest = params;
  return params;
}
/* Backend tables of one device may differ in their rows. */
LI_FN bool li_same_device(const luna_ctx *a, const luna_ctx *b) {
  const luna_backend *x = a->backend, *y = b->backend;
  return x == y || (x->device != 0 && x->device == y->device && x->allocate == y->allocate && x->wait == y->wait);
}

LUNA_API luna_params *luna_params_share(luna_ctx *ctx, const luna_params *from) {
  if (!ctx) return NULL;
  if (!from) {
    li_remember(ctx, li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "from"));
    return NULL;
  }
  luna_params *params = luna_params_open(ctx);
  const luna_params *root = from;
  if (!params) return NULL;
  params->shared = from;
  while (root->shared) root = root->shared;
  if (root->ctx == ctx || !li_same_device(ctx, root->ctx) || !li_queues(ctx) || !li_queues(root->ctx))
    return params;
  params->sharing.owner = root->ctx;
  params->sharing.next = ctx->sharing;
  ctx->sharing = &params->sharing;
  if (li_backend_result(ctx, __func__, li_wait_for_owners(ctx)) == LUNA_OK) return params;
  return NULL;
}

/* Returns the slot of a name with this hash, or the free slot where it belongs. */
LI_FN li_param **li_names_slot(const li_names *names, const char *name, uint64_t hash) {
  for (uint64_t i = hash;; i++) {
    li_param **slot = &names->slots[i & (uint64_t)(2 * names->room - 1)];
    if (!*slot || ((*slot)->hash == hash && strcmp((*slot)->name, name) == 0)) return slot;
  }
}
LI_FN void li_names_put(li_names *names, int64_t index, li_param *p) {
  names->at[index] = *li_names_slot(names, p->name, p->hash) = p;
}
/* Makes room for one more than `size` parameters. Returns false, with nothing changed, if there is no memory. */
LI_FN bool li_names_grow(luna_ctx *ctx, li_names *names, int64_t size) {
  li_names grown;
  void *memory;
  if (size < names->room) return true;
  grown.room = li_max(16, 2 * names->room);
  if (!li_persist(ctx, 3 * (size_t)grown.room * sizeof(li_param *), false, &memory)) return false;
  grown.at = (li_param **)memory;
  grown.slots = grown.at + grown.room;
  for (int64_t i = 0; i < size; i++) li_names_put(&grown, i, names->at[i]);
  *names = grown;
  return true;
}
LI_FN uint64_t li_hash(const char *name) { /* FNV-1a */
  uint64_t h = 0xCBF29CE484222325u;
  for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001B3u;
  return h;
}
LI_FN li_param *li_param_find(const luna_params *params, const char *name) {
  if (!params || params->size == 0) return NULL;
  return *li_names_slot(&params->names, name, li_hash(name));
}
LUNA_API luna_tensor *luna_params_find(const luna_params *params, const char *name) {
  if (!name) return NULL;
  li_param *p = li_param_find(params, name);
  if (p) return &p->tensor;
  return NULL;
}
LUNA_API luna_ctx *luna_params_ctx(const luna_params *params) { return LI_OF(params, ctx); }
LUNA_API int64_t luna_params_tensor_count(const luna_params *params) { return LI_OF(params, size); }
LUNA_API luna_tensor *luna_params_at(const luna_params *params, int64_t index, const char **name) {
  if (!params || index < 0 || index >= params->size) return NULL;
  li_param *p = params->names.at[index];
  if (name) *name = p->name;
  return &p->tensor;
}
LUNA_API int64_t luna_params_element_count(const luna_params *params) {
  int64_t count = 0;
  if (!params) return 0;
  for (li_param *p = params->first; p; p = p->next) count += luna_count(&p->tensor);
  return count;
}
LUNA_API luna_status luna_params_zero_grad(luna_params *params) {
  if (!params) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = params->ctx;
  luna_status status = ctx->open_status;
  /* The state's nonfinite came from the loss of these gradients. */
  if (status == LUNA_OK && !ctx->options.measure) status = ctx->backend->begin(ctx, ctx->state, false, true);
  for (li_param *p = params->first; p && status == LUNA_OK; p = p->next)
    if (p->tensor.grad) status = ctx->backend->zero(ctx, p->tensor.grad, li_bytes(luna_count(&p->tensor)));
  return status;
}

LUNA_API luna_status luna_params_freeze(luna_params *params, const char *name, bool frozen) {
  if (!params) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = params->ctx;
  int64_t matched = 0;
  if (params->shared) return li_fail_status(ctx, LUNA_ERROR_SET_BORROWED, __func__);
  if (ctx->tape) return li_fail_status(ctx, LUNA_ERROR_FREEZE_TAPE);

  for (li_param *p = params->first; p; p = p->next) {
    luna_tensor *t = &p->tensor;
    if (name && !strstr(p->name, name)) continue;
    matched++;
    if (t->needs_grad != frozen) continue;
    const luna_status status = t->grad ? ctx->backend->zero(ctx, t->grad, li_bytes(luna_count(t))) : LUNA_OK;
    if (status != LUNA_OK) return li_backend_result(ctx, __func__, status);

    float *grad = t->grad;
    const bool has_grad = t->own->has_grad;
    t->needs_grad = !frozen;
    t->grad = p->frozen_grad;
    t->own->has_grad = p->had_grad;
    p->frozen_grad = grad;
    p->had_grad = has_grad;
  }

  if (matched) return LUNA_OK;
  return li_fail_status(ctx, LUNA_ERROR_FREEZE_EMPTY, name ? name : "");
}

/* --- First values: on every machine element e has the Philox words of counter (e, hash of the name), key = seed --- */
LI_FN float li_unit(uint32_t word) { return ((float)(word >> 8) + 0.5f) * (1.0f / 16777216.0f); } /* (0, 1) */
/* Marsaglia's polar method. Retries count from bit 48, above every element. */
LI_FN float li_normal(uint32_t counter[4], uint64_t seed) {
  for (;; counter[1] += 0x10000u) {
    uint32_t word[4];
    li_philox(counter, seed, word);
    for (int i = 0; i < 4; i += 2) {
      const float u = 2 * li_unit(word[i]) - 1, v = 2 * li_unit(word[i + 1]) - 1, s = u * u + v * v;
      if (s > 0 && s < 1) return u * (float)sqrt((double)(-2 * li_log1_scalar(s) / s));
    }
  }
}
typedef struct li_first { luna_init_kind kind; float scale; int64_t width; uint64_t hash, seed; } li_first;
/* Returns the logit of a forget gate whose time constant is 8 128^(slot / (slots - 1)) tokens. */
LI_FN float li_forget_logit(int64_t slot, int64_t slots) {
  const float place = slots > 1 ? (float)slot / (float)(slots - 1) : 0.5f;
  const float time = 8 * li_exp1_scalar(4.852030264f * place); /* ln 128 */
  return -li_log1_scalar(li_exp1_scalar(16 / time) - 1);
}

/* Returns the fade of a head whose time constant is 16 (longest / 16)^(head / (heads - 1)) tokens; of one head, 128. */
LI_FN float li_fade_logit(int64_t head, int64_t heads, float longest) {
  float time = 128;
  if (longest < 16) longest = 16;
  if (heads > 1) time = 16 * li_exp1_scalar(li_log1_scalar(longest / 16) * (float)head / (float)(heads - 1));
  return -li_log1_scalar(time / 4 - 1);
}

LI_FN void li_first_values(const li_first *f, float *out, int64_t first, int64_t count) {
  const int64_t slots = f->scale >= 1 && f->scale < 1e9f ? (int64_t)f->scale : 1;
  for (int64_t i = 0, at = first; i < count; i++, at++) {
    uint32_t word[4];
    uint32_t counter[4] = { (uint32_t)at, (uint32_t)((uint64_t)at >> 32), (uint32_t)f->hash,
                            (uint32_t)(f->hash >> 32) };
    switch (f->kind) {
      case LUNA_INIT_ZEROS: out[i] = 0; break;
      case LUNA_INIT_ONES: out[i] = f->scale; break;
      case LUNA_INIT_FORGET: out[i] = li_forget_logit(at % slots, slots); break;
      case LUNA_INIT_FADE: out[i] = li_fade_logit(at % f->width, f->width, f->scale); break;
      case LUNA_INIT_NORMAL: out[i] = f->scale * li_normal(counter, f->seed); break;
      default:
        li_philox(counter, f->seed, word);
        out[i] = f->scale * (2 * li_unit(word[0]) - 1);
        if (f->kind == LUNA_INIT_IDENTITY && (at + 1) % f->width == 0) out[i] += 1.0f;
    }
  }
}

LI_FN luna_status li_first_write(luna_tensor *t, luna_init init, uint64_t hash, uint64_t seed) {
  const int64_t all = luna_count(t), out = t->shape[0];
  li_first f = { init.kind, init.scale, li_last(t), hash, seed };
  float block[1024];
  luna_status status = LUNA_OK;
  if (f.scale == 0) f.scale = 1;
  if (f.kind == LUNA_INIT_XAVIER) {
    const int64_t in = t->rank > 1 ? all / li_max(1, out) : all;
    f.scale *= (float)sqrt(6.0 / (double)li_max(1, in + out));
  }

  for (int64_t at = 0; at < all && status == LUNA_OK && !t->ctx->options.measure; at += 1024) {
    const int64_t n = li_min(1024, all - at);
    li_first_values(&f, block, at, n);
    status = t->ctx->backend->copy(t->ctx, t->data + at, block, li_bytes(n), 1);
  }

  return status;
}
LUNA_API luna_tensor *luna_tensor_random(luna_ctx *ctx, luna_init init, uint64_t seed, int rank, const int64_t *shape) {
  const int64_t kind = (int64_t)init.kind, low = LUNA_INIT_NORMAL, high = LUNA_INIT_UNIFORM;
  const uint64_t use = 0x52616E64u; /* No other use of the seed has this number. */
  if (!ctx) return NULL;
  if (kind < low || kind > high) return li_fail(ctx, LUNA_ERROR_VALUE_RANGE, __func__, "init.kind", kind, low, high);
  if (!li_is_finite(init.scale))
    return li_fail(ctx, LUNA_ERROR_NOT_FINITE_ARGUMENT, __func__, "init.scale", (double)init.scale);
  luna_tensor *t = luna_tensor_new(ctx, NULL, rank, shape);
  if (!t) return NULL;
  const luna_status status = li_first_write(t, init, use, seed);
  if (status == LUNA_OK) return t;
  return li_fail_backend(ctx, __func__, status);
}

LI_FN bool li_is_like(const luna_tensor *a, const luna_tensor *b) {
  return a->rank == b->rank && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}
LI_FN bool li_st_like(const li_st_tensor *t, const luna_tensor *tensor) {
  return t->rank == tensor->rank && memcmp(t->shape, tensor->shape, (size_t)t->rank * sizeof t->shape[0]) == 0;
}
/* If a set shares another's values, makes its parameter read them. */
LI_FN luna_error_id li_borrow(li_param *p, const luna_params *params) {
  const li_param *other = li_param_find(params->shared, p->name);
  if (!li_same_device(params->shared->ctx, params->ctx)) return LUNA_ERROR_BORROW_DEVICE;
  if (!other) return LUNA_ERROR_BORROW_MISSING;
  if (!li_is_like(&other->tensor, &p->tensor)) return LUNA_ERROR_BORROW_SHAPE;
  p->tensor.data = other->tensor.data;
  p->tensor.grad = p->frozen_grad = NULL; /* Optimisers look at it, and an earlier training may have set it. */
  p->state.has_grad = p->had_grad = p->tensor.needs_grad = false;
  p->state.borrowed = p->state.given = true;
  return LUNA_ERROR_NONE;
}

/* Reads a tensor of a file into a parameter or a moment. */
LI_FN luna_status li_fill(luna_ctx *ctx, float *data, const li_st_tensor *t) {
  const int64_t size = (int64_t)li_st_formats[t->dtype].size;
  luna_status status = LUNA_OK;
  float block[1024];
  ctx->writes++;
  if (!li_on_device(ctx)) li_st_floats(t, data);
  else if (li_st_borrow(t)) status = ctx->backend->copy(ctx, data, t->data, t->bytes, 1);
  else {
    for (int64_t at = 0; at < t->count && status == LUNA_OK; at += 1024) {
      li_st_tensor part = *t;
      part.data += at * size;
      part.first = at;
      part.count = li_min(1024, t->count - at);
      part.bytes = (size_t)(part.count * size);
      li_st_floats(&part, block);
      status = ctx->backend->copy(ctx, data + at, block, li_bytes(part.count), 1);
    }
  }

  return li_backend_result(ctx, "a parameter's values", status);
}
LI_FN luna_status li_param_load(li_param *p, const li_st_tensor *t) {
  p->state.given = true;
  return li_fill(p->tensor.ctx, p->tensor.data, t);
}

/* A file may have, by a parameter's name, values that fit, nothing, another shape, or numbers that are not real. */
typedef enum li_fit { LI_FIT, LI_FIT_ABSENT, LI_FIT_SHAPE, LI_FIT_FORMAT } li_fit;
LI_FN li_fit li_st_fit(const li_st *st, const char *name, const luna_tensor *like, li_st_tensor *t) {
  if (!li_st_value(st, name, t)) return LI_FIT_ABSENT;
  if (!li_st_like(t, like)) return LI_FIT_SHAPE;
  if (li_st_is_real(t)) return LI_FIT;
  return LI_FIT_FORMAT;
}
/* Finds the file's tensor of this name and shape, or fails. */
LI_FN bool li_fills(const li_st *st, luna_ctx *ctx, const char *name, int rank, const int64_t *shape, li_st_tensor *t) {
  luna_tensor like;
  li_tensor_set(&like, ctx, rank, shape);
  if (li_st_fit(st, name, &like, t) == LI_FIT) return true;
  li_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_MISSING, ctx->call, li_file_name(ctx), name, &like);
  return false;
}

/* Returns whether a parameter may have that name. */
LI_FN bool li_param_named(const luna_params *params, const char *name) {
  luna_ctx *ctx = params->ctx;
  if (!li_is_given(ctx, "luna_param", "name", name != NULL)) return false;
  const size_t size = strlen(name);
  if (!li_is_text(name)) li_fail_status(ctx, LUNA_ERROR_NOT_UTF8, "luna_param", "the name");
  else if (size >= LI_MAX_PARAM_NAME)
    li_fail_status(ctx, LUNA_ERROR_NAME_LENGTH, "luna_param", (int64_t)size, (int64_t)LI_MAX_PARAM_NAME - 1, name, "");
  else if (li_is_ours(name) || strcmp(name, "__metadata__") == 0)
    li_fail_status(ctx, LUNA_ERROR_NAME_RESERVED, "luna_param", name);
  else if (li_param_find(params, name)) li_fail_status(ctx, LUNA_ERROR_PARAM_EXISTS, name);
  else return true;
  return false;
}

LI_FN luna_tensor *li_param_make(luna_params *params, const char *name, int rank, const int64_t *shape,
                                 luna_init init) {
  luna_ctx *ctx = params->ctx;
  const int64_t count = li_shape_count(rank, shape);
  li_st_tensor stored;
  void *memory, *data = NULL;
  luna_status status = LUNA_OK;
  luna_error_id wrong = LUNA_ERROR_NONE;

  if (count < 0) {
    const luna_tensor like = li_like(ctx, rank, shape);
    li_fail_status(ctx, LUNA_ERROR_SHAPE, "luna_param", name ? name : "the shape", &like, (int64_t)rank, LI_MAX_COUNT);
    return NULL;
  }

  if (!li_param_named(params, name) || !li_in(ctx, name, "init.kind", (int64_t)init.kind, 0, LUNA_INIT_FADE) ||
      !li_is_number(ctx, name, "init.scale", init.scale)) return NULL;
  if (params->filling && !li_fills(params->filling, ctx, name, rank, shape, &stored)) return NULL;
  const li_persist_mark mark = li_persistent(ctx);
  const size_t name_size = strlen(name) + 1;
  li_names names = params->names;
  if (!li_persist(ctx, sizeof(li_param) + name_size, false, &memory) || !li_names_grow(ctx, &names, params->size) ||
      (!params->shared && !li_persist(ctx, li_bytes(count), true, &data))) {
    li_persist_rewind(ctx, mark);
    li_fail_memory(ctx, "luna_param", li_bytes(count));
    return NULL;
  }

  li_param *p = (li_param *)memory;
  p->name = (char *)memcpy(p + 1, name, name_size);
  p->hash = li_hash(name);
  li_tensor_set(&p->tensor, ctx, rank, shape);
  p->tensor.own = &p->state;
  p->tensor.parameter = true;
  p->tensor.needs_grad = true;
  p->tensor.data = (float *)data;
  if (params->shared) wrong = li_borrow(p, params);
  else if (!params->filling)
    status = li_backend_result(ctx, "luna_param", li_first_write(&p->tensor, init, p->hash, ctx->options.seed));
  else if (!ctx->options.measure) status = li_param_load(p, &stored);
  if (wrong) status = li_fail_status(ctx, (int)wrong, "luna_param", p->name, &p->tensor);
  if (status != LUNA_OK) {
    li_persist_rewind(ctx, mark);
    return NULL;
  }
  params->names = names;
  li_names_put(&params->names, params->size++, p);
  if (params->last) params->last->next = p;
  else params->first = p;
  params->last = p;
  return &p->tensor;
}
LUNA_API luna_tensor *luna_param(luna_params *params, const char *name, int rank, const int64_t *shape,
                                 luna_init init) {
  if (!params) return NULL;
  luna_tensor *t = li_param_make(params, name, rank, shape, init);
  li_remember(params->ctx, t ? LUNA_OK : params->ctx->last_status);
  return t;
}

/* --- An init makes all its parameters, or makes none and zeroes its struct; the outermost one is remembered --- */
typedef struct li_setup {
  luna_params *params;
  void *made;              /* The struct */
  size_t size;
  const char *outer;       /* For li_leave */
  li_persist_mark memory;
  const li_hooked *hooked; /* Newest before */
  luna_params before;      /* The set before */
} li_setup;
/* Begins an init. Returns false if that cannot succeed, with a sentence if there is a context. li_setup_end must follow
   either way. */
LI_FN bool li_setup_begin(li_setup *s, const char *name, luna_params *params, void *made, size_t size) {
  memset(s, 0, sizeof *s);
  s->params = params;
  s->made = made;
  s->size = size;
  if (!params) return false;
  luna_ctx *ctx = params->ctx;
  s->memory = li_persistent(ctx);
  s->hooked = ctx->hooked;
  s->before = *params;
  ctx->setups++;
  s->outer = li_enter(ctx, name);
  ctx->last_status = ctx->open_status;
  return ctx->open_status == LUNA_OK && li_is_given(ctx, name, "the layer or model", made != NULL);
}
LI_FN bool li_setup_config(const li_setup *s, const void *config, size_t size) {
  memset(s->made, 0, s->size);
  memcpy(s->made, config, size);
  return true;
}
LI_FN li_meta *li_meta_find(const luna_params *params, const char *key) {
  for (li_meta *m = params->metas; m; m = m->next)
    if (strcmp(m->key, key) == 0) return m;
  return NULL;
}
LI_FN void li_setup_undo(const li_setup *s) {
  luna_params *params = s->params;
  const luna_params *before = &s->before;
  li_close_hooked(params->ctx, s->hooked);
  for (; params->replaced != before->replaced; params->replaced = params->replaced->next)
    li_meta_find(params, params->replaced->key)->value = params->replaced->value;
  for (int64_t i = params->size - 1; i >= before->size && before->size > 0; i--)
    *li_names_slot(&before->names, params->names.at[i]->name, params->names.at[i]->hash) = NULL;
  *params = *before;
  if (params->last) params->last->next = NULL;
  if (params->last_meta) params->last_meta->next = NULL;
  li_persist_rewind(params->ctx, s->memory);
}

LI_FN luna_status li_setup_end(const li_setup *s, bool good) {
  luna_status status = LUNA_OK;
  if (!good && s->made) memset(s->made, 0, s->size);
  if (!s->params) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = s->params->ctx;

  if (!good) {
    li_setup_undo(s);
    status = ctx->last_status;
    if (status == LUNA_OK) status = LUNA_OUT_OF_MEMORY;
  }

  ctx->setups--;
  li_leave(ctx, s->outer);
  li_remember(ctx, status);
  return status;
}
LI_FN luna_ctx *li_ctx_of(const luna_params *params) { return LI_OF(params, ctx); }

/* Returns the horizon of a set's models. The sequences of this pass have up to n rows, which count when it trains. */
LI_FN int64_t li_params_horizon(luna_params *params, int64_t n) {
  const luna_params *source = params;
  if (params->ctx->training && !params->horizon_fixed && n > params->horizon) params->horizon = n;
  while (source->shared && !params->horizon_fixed) source = source->shared;
  return li_max(params->horizon, source->horizon);
}
/* Sets a config's horizon: 0 leaves it open, below 0 is none. */
LI_FN void li_params_fix_horizon(luna_params *params, int64_t horizon) {
  if (horizon == 0) return;
  params->horizon = li_max(0, horizon);
  params->horizon_fixed = params->horizon_own = true;
}

/* --- Text pairs --- */
LUNA_API const char *luna_params_get_text(const luna_params *params, const char *key) {
  if (!params || !key) return NULL;
  const li_meta *m = li_meta_find(params, key);
  if (m) return m->value;
  return NULL;
}

/* Adds a pair, or changes the value of the pair with that key: in place if it fits and no init may be undone. */
LI_FN luna_status li_params_put(luna_params *params, const char *key, const char *value) {
  luna_ctx *ctx = params->ctx;
  const size_t key_size = strlen(key) + 1, size = strlen(value) + 1;
  if (!li_is_text(key) || !li_is_text(value))
    return li_fail_status(ctx, LUNA_ERROR_NOT_UTF8, "luna_params_set_text", li_is_text(key) ? "value" : "key");
  li_meta *same = li_meta_find(params, key);
  if (same && ctx->setups == 0 && size <= strlen(same->value) + 1) {
    memmove((char *)(uintptr_t)same->value, value, size);
    return LUNA_OK;
  }
  li_meta *pair = (li_meta *)li_persist_host(ctx, "luna_params_set_text", sizeof *pair + key_size + size);
  if (!pair) return ctx->last_status;
  pair->key = (char *)memcpy(pair + 1, key, key_size);
  pair->value = (char *)memcpy((char *)(pair + 1) + key_size, value, size);

  if (same) {
    const char *replaced = same->value;
    same->value = pair->value;
    pair->value = replaced;
    pair->next = params->replaced;
    params->replaced = pair;
    return LUNA_OK;
  }

  if (params->last_meta) params->last_meta->next = pair;
  else params->metas = pair;
  params->last_meta = pair;
  return LUNA_OK;
}
LUNA_API luna_status luna_params_set_text(luna_params *params, const char *key, const char *value) {
  if (!params) return LUNA_BAD_ARGUMENT;
  if (!key || !value)
    return li_fail_status(params->ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, key ? "value" : "key");
  if (li_is_ours(key)) return li_fail_status(params->ctx, LUNA_ERROR_NAME_RESERVED, __func__, key);
  return li_params_put(params, key, value);
}

/* ----------------
   >>past: what a layer of a stream has beside its rows, in backend memory. Ops that look back read and update what it
   keeps of earlier tokens. What depends only on parameters and sources is computed once.
   ---------------- */
typedef struct li_past {
  const int64_t *position;  /* As in luna_op */
  ptrdiff_t before;         /* As in luna_op; history counts it in 8 bytes. With it only these are set: */
  double *state;            /* As in luna_op */
  float *history;           /* [batch, convolution - 1, dim] */
  /* There is one memory for all sequences; a decoder has one for each batch / sources sequences. */
  int64_t sources;
  /* Folded, they are [sources, heads slots, dim], else scaled queries [sources, heads, slots, head_dim]. One source has
     no axis of its own. */
  luna_tensor scores;
  luna_tensor scores_bias;  /* Not folded, its rank is 0; else it is [heads slots] or [sources, 1, heads slots]. */
  luna_tensor keys, values; /* A decoder has those of the packed context: [sources, slots, dim]. */
  const int32_t *slots, *source_slots; /* A decoder's: [batch], [sources] */
} li_past;

/* ----------------
   >>impl_ops: each op in one place. An op's query says how much memory it needs. Its forward and backward fill the
   arguments of kernels from a luna_op. LI_CPU_<NAME> is its row in the CPU's table. Its public function checks shapes
   and builds the op (>>impl_tensors: li_start, li_finish). Checks and helpers come first, the table last. The guide's
   "Adding an op to luna.h" has the steps. Guarded by tests/engine/ops.c (against naive loops and the reference) and
   tests/engine/gradients.c (finite differences).
   ---------------- */

/* A stream's shapes were checked when it was opened. */
LI_HOT bool li_is_checked(const luna_ctx *ctx) { return ctx->bump; }

/* A pattern gives the shapes of an op's inputs, as "x [...,i] weight [o,i] bias? [o]". A letter is the same size in all
   inputs, and a capital is at least 1. "..." means equal leading axes. An input with "?" may be null. */
typedef struct li_pattern {
  int64_t sizes[64];          /* By letter; -1: unknown */
  int64_t wrong;              /* The differing size */
  const luna_tensor *leading; /* First input with "..." */
  int after;                  /* Its axes after "..." */
} li_pattern;

/* Returns 0 if an input's axes fit, else the letter that differs: '.' for the leading axes, '[' for their count. */
LI_HOT char li_axes_wrong(li_pattern *p, const luna_tensor *t, const char *axes) {
  const bool open = axes[1] == '.';
  const char *first = axes + (open ? 5 : 1), *at = first; /* After "[...," or "[" */
  while (at[0] && at[1] == ',') at += 2;
  const int rank = (int)(at - first) / 2 + 1;
  const int before = t->rank - rank;
  if (before < 0 || (before > 0 && !open)) return '[';
  for (int a = 0; a < rank; a++) {
    const char letter = first[2 * a];
    const int64_t size = t->shape[before + a];
    int64_t *known = &p->sizes[letter - 'A'];
    if (*known < 0) *known = size;
    p->wrong = size;
    if (size != *known || (size < 1 && letter < 'a')) return letter;
  }
  if (!open) return 0;
  if (!p->leading) {
    p->leading = t;
    p->after = rank;
  }
  if (p->leading->rank - p->after != before) return '.';
  if (memcmp(p->leading->shape, t->shape, (size_t)before * sizeof *t->shape) == 0) return 0;
  return '.';
}

/* Copies the name of the first input with that letter. */
LI_FN void li_pattern_name(const char *pattern, char letter, char *name, size_t room) {
  const char *start = pattern, *at = pattern;
  for (bool inside = false; *at && !(inside && *at == letter); at++) {
    if (*at == ' ' && at[1] != '[') start = at + 1;
    if (*at == '[' || *at == ']') inside = *at == '[';
  }
  for (; room > 1 && *start != ' ' && *start != '?'; room--) *name++ = *start++;
  *name = 0;
}

/* Reports what an input's axes should have been. `wrong` is from li_axes_wrong; the name begins at `at`. */
LI_FN bool li_fits_not(const li_build *s, const char *pattern, const li_pattern *p, const luna_tensor *t,
                       const char *at, char wrong) {
  char name[16], first[16], why[80];
  const char letter[2] = { wrong, 0 };
  size_t length = 0;
  for (; *at != ' ' && *at != '?'; at++)
    if (length + 1 < sizeof name) name[length++] = *at;
  name[length] = 0;
  if (!t) return li_refused(li_fail_null(s->op.ctx, s->name, name));
  int64_t size = 0;
  if (wrong >= 'A' && wrong != '[') size = p->sizes[wrong - 'A'];
  li_pattern_name(pattern, wrong, first, sizeof first);
  const char *format = "its %s is %d, that of %s is %d";
  if (size == p->wrong) format = "%s is at least 1";
  if (wrong == '[') format = "the number of axes";
  if (wrong == '.') format = "the leading axes";
  li_print(why, sizeof why, format, letter, p->wrong, first, size);
  return li_refuse(s->op.ctx, LUNA_ERROR_SHAPES, s->name, name, t, pattern, why);
}

LI_HOT bool li_fits(const li_build *s, const char *pattern) {
  li_pattern p;
  if (li_is_checked(s->op.ctx)) return true;
  for (size_t i = 0; i < sizeof p.sizes / sizeof *p.sizes; i++) p.sizes[i] = -1;
  p.leading = NULL;
  const char *at = pattern;
  for (int i = 0; *at; i++) {
    const luna_tensor *t = s->op.in[i];
    const char *name = at;
    while (*at != '[') at++;
    char wrong = 0;
    if (t) wrong = li_axes_wrong(&p, t, at);
    if (wrong || (!t && at[-2] != '?')) return li_fits_not(s, pattern, &p, t, name, wrong);
    while (*at != ']') at++;
    at += 1 + (at[1] == ' ');
  }
  return true;
}
LI_HOT bool li_product_fits(const li_build *s, int64_t a, int64_t b, int64_t max) {
  if (li_is_checked(s->op.ctx) || li_product(a, b, max) >= 0) return true;
  return li_refuse(s->op.ctx, LUNA_ERROR_TOO_LARGE, s->name, a, b, max);
}
/* Checks that all inputs' last axes divide into heads of a size that kernels can hold. */
LI_FN bool li_heads_fit(const li_build *s, int64_t heads) {
  for (int i = 0; i < s->op.inputs && !li_is_checked(s->op.ctx); i++) {
    const int64_t dim = li_last(s->op.in[i]);
    if (heads < 1 || dim % heads != 0)
      return li_refuse(s->op.ctx, LUNA_ERROR_HEADS, s->name, dim, "heads", heads);
    if (!li_product_fits(s, 1, dim / heads, LI_MAX_SCRATCH)) return false;
  }
  return true;
}

LI_FN bool li_dropout_wrong(li_build *s, float probability) {
  if (li_is_checked(s->op.ctx) || (probability >= 0 && probability < 1)) return false;
  li_fail(s->op.ctx, LUNA_ERROR_PROBABILITY, s->name, "dropout", (double)probability);
  return true;
}

LI_FN bool li_has_op(const luna_tensor *t, luna_op_kind kind) {
  return t->ctx->backend->op[kind].forward != NULL;
}

/* ---- Helpers ---- */
#ifdef LUNA_NO_TRAIN
#define LI_CPU_OP(query, forward, backward, can) { query, forward, NULL, can }
#else
#define LI_CPU_OP(query, forward, backward, can) { query, forward, backward, can }
#endif

/* Threads share body(op, first, last) over `count` items, in units of about LI_SPLIT elements: an item has `width`. */
typedef void (*li_body)(luna_op *op, int64_t first, int64_t last);
typedef struct li_split_work { luna_op *op; li_body body; int64_t count, unit; } li_split_work;
LI_HOT void li_split_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_split_work *w = (const li_split_work *)work;
  (void)thread;
  w->body(w->op, first * w->unit, li_min(last * w->unit, w->count));
}
LI_FN luna_status li_split(luna_op *op, int64_t count, int64_t width, li_body body) {
  li_split_work w = { op, body, count, li_max(1, LI_SPLIT / li_max(1, width)) };
  li_each(&op->ctx->parallel, li_divide_up(count, w.unit), li_split_task, &w);
  return LUNA_OK;
}

/* The next three macros define an op's functions; its LI_CPU_<NAME> spells their names out. LI_SPLIT_OP makes
   li_<name>_forward and li_<name>_backward from li_<name>_body and li_<name>_back. */
#define LI_SPLIT_OP(name, count, width) \
  LI_FN luna_status li_##name##_forward(luna_op *op) { return li_split(op, count, width, li_##name##_body); } \
  LI_FN luna_status li_##name##_backward(luna_op *op) { return li_split(op, count, width, li_##name##_back); }
/* Makes the same from li_<name>_part(op, back, first, last), which does both directions. */
#define LI_PART_OP(name, count, width) \
  LI_FN void li_##name##_body(luna_op *op, int64_t first, int64_t last) { \
    li_##name##_part(op, false, first, last); \
  } \
  LI_FN void li_##name##_back(luna_op *op, int64_t first, int64_t last) { \
    li_##name##_part(op, true, first, last); \
  } \
  LI_SPLIT_OP(name, count, width)
/* Makes the same from li_<name>_run(op, back), which is not split among threads. */
#define LI_RUN_OP(name) \
  LI_FN luna_status li_##name##_forward(luna_op *op) { return li_##name##_run(op, false); } \
  LI_FN luna_status li_##name##_backward(luna_op *op) { return li_##name##_run(op, true); }

LI_INLINE const li_kernels *li_k(const luna_op *op) { return op->ctx->kernels; }

/* An op with one input reads and writes data in forward, and gradients in the other direction in backward. */
typedef struct li_way { const float *from; float *to; } li_way;
LI_INLINE li_way li_way_of(const luna_op *op, bool back) {
  const li_way forward = { op->in[0]->data, op->out[0]->data }, backward = { op->out[0]->grad, op->in[0]->grad };
  if (back) return backward;
  return forward;
}
LI_INLINE float *li_data(const luna_op *op, int i) { return op->in[i] ? op->in[i]->data : NULL; }
LI_INLINE float *li_grad(const luna_op *op, int i) { return op->in[i] ? op->in[i]->grad : NULL; }
LI_FN void li_query_none(luna_op *op) { (void)op; }
LI_INLINE bool li_op_bf16(const luna_op *op) { return op->ctx->options.products == LUNA_DTYPE_BF16; }
LI_INLINE const li_int8 *li_op_int8(const luna_op *op, int i) {
#ifdef LUNA_NO_INT8
  return (void)op, (void)i, (const li_int8 *)NULL;
#else
  return op->ctx->training ? NULL : op->in[i]->int8;
#endif
}

/* y [outer, columns] += factor * the sums over the rows of x [outer, rows, columns]. Threads share the columns. */
typedef struct li_sum_work {
  const li_kernels *kernels;
  int64_t outer;
  li_matrix x;
  float factor;
  float *y;
} li_sum_work;
LI_HOT const li_parallel *li_sum_parallel(const luna_op *op, int64_t count) {
  if (count > LI_SPLIT) return &op->ctx->parallel;
  return NULL;
}
LI_HOT void li_sum_columns_task(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_sum_work *w = (const li_sum_work *)work;
  li_matrix x = w->x;
  (void)thread;
  for (int64_t o = 0; o < w->outer; o++, x.at += x.rows * x.row)
    w->kernels->sum_rows(li_columns(x, first, last), w->factor, w->y + o * x.columns + first);
}
LI_HOT void li_sum_lines_task(void *work, int64_t thread, int64_t first, int64_t last) { /* x has one column */
  const li_sum_work *w = (const li_sum_work *)work;
  (void)thread;
  for (int64_t o = first; o < last; o++)
    w->y[o] += (float)(w->kernels->sum(w->x.rows, w->x.at + o * w->x.rows) * (double)w->factor);
}
LI_HOT void li_sum_columns(const luna_op *op, li_matrix x, float *y) {
  li_sum_work w = { li_k(op), 1, x, 1, y };
  if (y) li_each(li_sum_parallel(op, x.rows * x.columns), x.columns, li_sum_columns_task, &w);
}
LI_FN void li_sum_axis(const luna_op *op, const int64_t shape[3], float factor, const float *x, float *y) {
  li_sum_work w = { li_k(op), shape[0], li_dense(x, shape[1], shape[2]), factor, y };
  const li_parallel *parallel = li_sum_parallel(op, shape[0] * shape[1] * shape[2]);
  if (shape[2] > 1) li_each(parallel, shape[2], li_sum_columns_task, &w);
  else if (shape[2] == 1) li_each(parallel, shape[0], li_sum_lines_task, &w);
}

/* --- Dropout --- */
/* The product wraps, because a context that only measures may count more elements than int64_t holds. */
LI_INLINE int64_t li_times(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }
/* If an op holds only part of a batch, an element's dropout depends on its place in the whole batch. */
LI_HOT li_dropout li_dropout_in(const luna_op *op, float probability, uint32_t number, int64_t count) {
  const luna_step_state *state = op->ctx->state;
  li_dropout d = li_dropout_of(probability, state->seed, number, (uint32_t)state->step);
  li_cut cut = op->out[0]->own->cut;
  if (cut.own == 0 && op->inputs > 1 && op->in[1]) cut = op->in[1]->own->cut;
  if (cut.own > 0) d.first = (uint64_t)cut.first * (uint64_t)(count / cut.own);
  return d;
}
LI_FN li_dropout li_op_dropout(const luna_op *op, int64_t count) {
  return li_dropout_in(op, op->dropout, op->dropout_op, count);
}
LI_FN li_dropout li_op_last_dropout(const luna_op *op) {
  return li_dropout_in(op, op->last_dropout, op->last_dropout_op, luna_count(op->out[0]));
}

/* The last input is added to the result, so its gradient is the result's. Nothing is added if both share one buffer. */
LI_FN luna_tensor *li_added(const luna_op *op) { return op->in[op->inputs - 1]; }
LI_FN void li_added_body(luna_op *op, int64_t first, int64_t last) {
  float *to = li_added(op)->grad + first;
  li_k(op)->add(last - first, to, op->out[0]->grad + first, to);
}
LI_FN void li_added_backward(luna_op *op) {
  const luna_tensor *x = li_added(op);
  if (x && x->grad && x->grad != op->out[0]->grad) li_split(op, luna_count(x), 1, li_added_body);
}

/* C = A B, dense */
LI_FN void li_gemm_set(li_gemm *g, li_matrix a, li_matrix b, float *c) {
  li_clear(g, sizeof *g);
  g->a = a.at;
  g->b = b.at;
  g->c = c;
  g->m = a.rows;
  g->n = g->c_row = b.columns;
  g->k = a.columns;
  g->a_row = a.row;
  g->a_column = a.column;
  g->b_row = b.row;
  g->b_column = b.column;
  g->batch[0] = g->batch[1] = 1;
  g->alpha = 1;
}

/* Makes li_<name>_query, _forward and _backward for an op that is one kernel. li_<name>_args fills the kernel's
   arguments. The op keeps kept_floats for backward. */
#define LI_KERNEL_OP(name, kept_floats) \
  LI_FN void li_##name##_query(luna_op *op) { \
    li_##name a; \
    if (op->training) op->kept_size = li_bytes(kept_floats); \
    li_##name##_args(op, &a); \
    op->workspace_size = li_##name##_scratch(li_k(op), &a, op->ctx->parallel.threads, false); \
    op->backward_workspace_size = li_##name##_scratch(li_k(op), &a, op->ctx->parallel.threads, true); \
  } \
  LI_FN luna_status li_##name##_forward(luna_op *op) { \
    li_##name a; \
    li_##name##_args(op, &a); \
    li_run_##name(li_k(op), &a, &op->ctx->parallel, op->workspace); \
    return LUNA_OK; \
  } \
  LI_FN luna_status li_##name##_backward(luna_op *op) { \
    li_##name a; \
    li_##name##_args(op, &a); \
    li_run_##name##_backward(li_k(op), &a, &op->ctx->parallel, op->workspace); \
    return LUNA_OK; \
  }

/* ---- Moving numbers ---- */
LI_FN bool li_has_axis(const luna_tensor *x, int axis, const char *name) {
  return (axis >= 0 && axis < x->rank) || li_refuse(x->ctx, LUNA_ERROR_AXIS, name, x, (int64_t)axis);
}

/* --- Reshape, detach: views --- */
LI_FN luna_tensor *li_view(li_build *s, luna_tensor *x, int rank, const int64_t *shape, int64_t offset) {
  luna_tensor *t = li_tensor_take(x->ctx, rank, shape);
  if (!t) return li_op_no_memory(s, sizeof(luna_tensor));
  t->data = x->data ? x->data + offset : NULL;
  t->needs_grad = x->needs_grad;
  t->base = li_base(x);
  if (x->ctx->bump) return t; /* A stream's tensors share one state. */
  t->own->offset = x->own->offset + offset;
  t->own->cut = x->own->cut;
  return t;
}

LUNA_API luna_tensor *luna_reshape(luna_tensor *x, int rank, const int64_t *shape) {
  int64_t full[LUNA_MAX_RANK], known = 1;
  int open = -1;
  li_build s;
  luna_tensor asked;
  if (!li_start(&s, LUNA_OP_COUNT, __func__, &x, 1, 1)) return NULL;
  if (li_is_checked(x->ctx)) return li_view(&s, x, rank, shape, 0);
  if (rank < 0 || rank > LUNA_MAX_RANK || (rank && !shape))
    return li_fail_shape(x->ctx, __func__, rank, shape);
  for (int a = 0; a < rank; a++) {
    full[a] = shape[a];
    if (shape[a] == -1 && open < 0) open = a;
    else known = li_checked(known, shape[a]);
  }
  if (open >= 0 && known > 0) full[open] = luna_count(x) / known;
  li_tensor_set(&asked, x->ctx, rank, rank ? full : shape);
  if (li_shape_count(rank, full) != luna_count(x))
    return li_fail(x->ctx, LUNA_ERROR_RESHAPE, x, luna_count(x), &asked);
  return li_view(&s, x, rank, full, 0);
}

LI_FN luna_tensor *li_reshape(luna_tensor *x, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = { a, b, c, d };
  return luna_reshape(x, rank, shape);
}

LUNA_API luna_tensor *luna_detach(luna_tensor *x) {
  li_build s;
  if (!li_start(&s, LUNA_OP_COUNT, __func__, &x, 1, 1)) return NULL;
  luna_tensor *t = li_view(&s, x, x->rank, x->shape, 0);
  if (t) t->needs_grad = false;
  return t;
}

/* --- Permute: y has the axes of x in another order --- */
LI_HOT luna_status li_permute_run(luna_op *op, bool back) {
  const luna_tensor *x = op->in[0];
  const li_way w = li_way_of(op, back);
  int64_t stride[4] = { 0, 0, 0, 0 }, shape[4] = { 1, 1, 1, 1 };
  const int before = 4 - x->rank; /* So many leading axes have size 1. */
  for (int a = before; a < 4; a++) {
    shape[a] = op->out[0]->shape[a - before];
    stride[a] = 1;
    for (int i = (int)op->arg.permute.axes[a - before] + 1; i < x->rank; i++) stride[a] *= x->shape[i];
  }
  const int64_t run = stride[3] == 1 ? li_max(1, shape[3]) : 16; /* 16 lines fit in cache. */
  for (int64_t i = 0; i < shape[0] * shape[1]; i++)
    for (int64_t first = 0; first < shape[3]; first += run)
      for (int64_t j = 0; j < shape[2]; j++) {
        const int64_t n = li_min(run, shape[3] - first), at = (i * shape[2] + j) * shape[3] + first;
        const int64_t row = i / shape[1] * stride[0] + i % shape[1] * stride[1] + j * stride[2] + first * stride[3];
        if (stride[3] == 1 && !back) memcpy(w.to + at, w.from + row, li_bytes(n));
        else if (stride[3] == 1) li_k(op)->add(n, w.to + row, w.from + at, w.to + row);
        else if (!back)
          for (int64_t k = 0; k < n; k++) w.to[at + k] = w.from[row + k * stride[3]];
        else
          for (int64_t k = 0; k < n; k++) w.to[row + k * stride[3]] += w.from[at + k];
      }
  return LUNA_OK;
}

LI_RUN_OP(permute)
#define LI_CPU_PERMUTE LI_CPU_OP(li_query_none, li_permute_forward, li_permute_backward, 0)

LUNA_API luna_tensor *luna_permute(luna_tensor *x, const int *axes) {
  int64_t shape[LUNA_MAX_RANK];
  int seen = 0;
  li_build s;
  if (!li_start(&s, LUNA_OP_PERMUTE, __func__, &x, 1, 1)) return NULL;
  if (!axes) return li_fail_null(x->ctx, __func__, "axes");
  for (int a = 0; a < x->rank; a++) {
    if (axes[a] < 0 || axes[a] >= x->rank || (seen >> axes[a] & 1))
      return li_fail(x->ctx, LUNA_ERROR_PERMUTE_AXES, (int64_t)axes[a], x);
    seen |= 1 << axes[a];
    shape[a] = x->shape[axes[a]];
    s.op.arg.permute.axes[a] = axes[a];
  }
  return li_finish(&s, x->rank, shape);
}

LI_FN luna_tensor *li_permute(luna_tensor *x, int a, int b, int c, int d) {
  const int axes[4] = { a, b, c, d };
  return luna_permute(x, axes);
}

/* --- Slice, split: x [outer,axis,inner] -> y [outer,count,inner] --- */
/* A slice copies a part of an axis, from `start` on, out of the whole; concat copies it into the whole. Backward adds
   the gradient in the other direction. */
LI_HOT void li_axis_part(const luna_op *op, const luna_tensor *whole, const luna_tensor *part, int64_t axis,
                         int64_t start, bool back) {
  const bool to_whole = (op->kind == LUNA_OP_SLICE) == back;
  int64_t inner = 1;
  for (int64_t a = axis + 1; a < whole->rank; a++) inner *= whole->shape[a];
  const int64_t width = part->shape[axis] * inner, stride = whole->shape[axis] * inner;
  const int64_t count = luna_count(whole);
  float *w = whole->data, *p = part->data;
  if (back) {
    w = whole->grad;
    p = part->grad;
  }
  for (int64_t r = 0; r * stride < count; r++) {
    float *inside = w + r * stride + start * inner, *alone = p + r * width;
    float *to = to_whole ? inside : alone;
    const float *from = to_whole ? alone : inside;
    if (back) li_k(op)->add(width, to, from, to);
    else li_copy(to, from, li_bytes(width));
  }
}

LI_FN luna_status li_slice_run(luna_op *op, bool back) {
  li_axis_part(op, op->in[0], op->out[0], op->arg.slice.axis, op->arg.slice.start, back);
  return LUNA_OK;
}
LI_RUN_OP(slice)
#define LI_CPU_SLICE LI_CPU_OP(li_query_none, li_slice_forward, li_slice_backward, 0)

LUNA_API luna_tensor *luna_slice(luna_tensor *x, int axis, int64_t start, int64_t count) {
  int64_t shape[LUNA_MAX_RANK];
  li_build s;
  if (!li_start(&s, LUNA_OP_SLICE, __func__, &x, 1, 1) || !li_has_axis(x, axis, s.name)) return NULL;
  if (start < 0 || count < 0 || start > x->shape[axis] || count > x->shape[axis] - start)
    return li_fail(x->ctx, LUNA_ERROR_SLICE_RANGE, start, count, (int64_t)axis, x);
  memcpy(shape, x->shape, sizeof shape);
  shape[axis] = count;
  if (axis == 0) return li_view(&s, x, x->rank, shape, start * (x->shape[1] * x->shape[2] * x->shape[3]));
  s.op.arg.slice.axis = axis;
  s.op.arg.slice.start = start;
  return li_finish(&s, x->rank, shape);
}

/* --- Concat: x_i [outer,n_i,inner] -> y [outer,sum n_i,inner] --- */
LI_HOT luna_status li_concat_run(luna_op *op, bool back) {
  const int64_t axis = op->arg.concat.axis;
  int64_t start = 0;
  for (int i = 0; i < op->inputs; start += op->in[i++]->shape[axis])
    if (!back || op->in[i]->grad) li_axis_part(op, op->out[0], op->in[i], axis, start, back);
  return LUNA_OK;
}

LI_RUN_OP(concat)
#define LI_CPU_CONCAT LI_CPU_OP(li_query_none, li_concat_forward, li_concat_backward, 0)

LUNA_API luna_tensor *luna_concat(luna_tensor *const *x, int count, int axis) {
  int64_t shape[LUNA_MAX_RANK];
  li_build s;
  if (!li_all(x, count, __func__) || !li_start(&s, LUNA_OP_CONCAT, __func__, x, 1, count) ||
      !li_has_axis(x[0], axis, __func__)) return NULL;
  memcpy(shape, x[0]->shape, sizeof shape);
  for (int i = 1; i < count; i++) {
    for (int a = 0; a < LUNA_MAX_RANK; a++)
      if (x[i]->rank != x[0]->rank || (a != axis && x[i]->shape[a] != shape[a]))
        return li_fail(x[0]->ctx, LUNA_ERROR_CONCAT_SHAPES, __func__, x[0], x[i], (int64_t)axis);
    shape[axis] += x[i]->shape[axis];
  }
  s.op.arg.concat.axis = axis;
  return li_finish(&s, x[0]->rank, shape);
}

/* --- Expand: x [...] -> y [count,...], which repeats x --- */
LI_FN luna_status li_expand_forward(luna_op *op) {
  const int64_t n = luna_count(op->in[0]);
  for (int64_t i = 0; i < op->arg.expand.count; i++)
    memcpy(op->out[0]->data + i * n, op->in[0]->data, li_bytes(n));
  return LUNA_OK;
}
LI_FN luna_status li_expand_backward(luna_op *op) { /* dy [count,...] -> dx [...] */
  li_sum_columns(op, li_dense(op->out[0]->grad, op->arg.expand.count, luna_count(op->in[0])), op->in[0]->grad);
  return LUNA_OK;
}
#define LI_CPU_EXPAND LI_CPU_OP(li_query_none, li_expand_forward, li_expand_backward, 0)

LUNA_API luna_tensor *luna_expand(luna_tensor *x, int64_t count) {
  int64_t shape[LUNA_MAX_RANK];
  li_build s;
  if (!li_start(&s, LUNA_OP_EXPAND, __func__, &x, 1, 1)) return NULL;
  if (x->rank == LUNA_MAX_RANK) return li_fail(x->ctx, LUNA_ERROR_NEW_AXIS, __func__, x);
  if (count < 0)
    return li_fail(x->ctx, LUNA_ERROR_VALUE_RANGE, __func__, "count", count, (int64_t)0, LI_MAX_COUNT);
  shape[0] = count;
  for (int a = 0; a < x->rank; a++) shape[a + 1] = x->shape[a];
  s.op.arg.expand.count = count;
  return li_finish(&s, x->rank + 1, shape);
}

/* --- Embedding: table [v,d], tokens [b,n] -> y [b,n,d] --- */
LI_HOT void li_embedding_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t d = li_last(op->in[0]);
#ifndef LUNA_NO_INT8
  if (!op->in[0]->data) { /* A stream's 8-bit table */
    for (int64_t i = first; i < last; i++)
      li_int8_floats(op->in[0]->int8, op->index[i], 1, op->out[0]->data + i * d);
    return;
  }
#endif
  for (int64_t i = first; i < last; i++)
    memcpy(op->out[0]->data + i * d, op->in[0]->data + op->index[i] * d, li_bytes(d));
}
LI_HOT void li_embedding_back(luna_op *op, int64_t first, int64_t last) { /* dy [b,n,d] -> dtable [v,d] */
  const int64_t d = li_last(op->out[0]), count = li_rows(op->out[0]);
  for (int64_t i = 0; i < count; i++) {
    float *row = op->in[0]->grad + op->index[i] * d + first;
    li_k(op)->add(last - first, row, op->out[0]->grad + i * d + first, row);
  }
}
LI_FN luna_status li_embedding_forward(luna_op *op) {
  return li_split(op, li_rows(op->out[0]), li_last(op->in[0]), li_embedding_body);
}
LI_FN luna_status li_embedding_backward(luna_op *op) {
  return li_split(op, li_last(op->in[0]), li_rows(op->out[0]), li_embedding_back);
}
#define LI_CPU_EMBEDDING LI_CPU_OP(li_query_none, li_embedding_forward, li_embedding_backward, 0)

LUNA_API luna_tensor *luna_embedding(luna_tensor *table, const int32_t *tokens, int64_t batch, int64_t n) {
  int64_t shape[3];
  li_build s;
  if (!li_start(&s, LUNA_OP_EMBEDDING, __func__, &table, 1, 1) || !li_fits(&s, "table [v,d]")) return NULL;
  shape[0] = batch;
  shape[1] = n;
  if (li_shape_count(2, shape) < 0) return li_fail_shape(table->ctx, __func__, 2, shape);
  if (!tokens && batch * n > 0) return li_fail_null(table->ctx, __func__, "tokens");
  s.op.index = li_integers(&s, tokens, batch * n, 0, table->shape[0] - 1, "tokens");
  shape[2] = table->shape[1];
  return li_finish(&s, 3, shape);
}

/* --- Gather: x [m,...], indices [count] -> y [count,...], by the embedding op --- */
LUNA_API luna_tensor *luna_gather_rows(luna_tensor *x, const int32_t *indices, int64_t count) {
  luna_tensor *flat = x;
  int64_t shape[LUNA_MAX_RANK];
  li_build s;
  if (x && x->rank < 1) return li_fail(x->ctx, LUNA_ERROR_AXIS, __func__, x, (int64_t)0);
  if (x && x->rank != 2) flat = li_reshape(x, 2, x->shape[0], x->shape[1] * x->shape[2] * x->shape[3], 1, 1);
  if (!li_start(&s, LUNA_OP_EMBEDDING, __func__, &flat, 1, 1)) return NULL;
  memcpy(shape, x->shape, sizeof shape);
  shape[0] = count;
  if (li_shape_count(x->rank, shape) < 0) return li_fail_shape(x->ctx, s.name, x->rank, shape);
  if (!indices && count > 0) return li_fail_null(x->ctx, s.name, "indices");
  s.op.index = li_integers(&s, indices, count, 0, x->shape[0] - 1, "indices");
  const int64_t rows[2] = { count, flat->shape[1] };
  luna_tensor *y = li_finish(&s, 2, rows);
  if (x->rank == 2) return y;
  return luna_reshape(y, x->rank, shape);
}

/* ---- Elementwise ops ---- */
/* --- Elementwise: up to three inputs, which broadcast --- */
/* Returns the rank of the result, or -1 if the inputs do not fit. Sets the result's shape, and in arg the shape and the
   strides, which were 0. There an axis joins the next one if all inputs' strides allow it, so that loops are long. */
LI_FN int li_broadcast(luna_op *op, int64_t *shape) {
  int64_t count[3] = { 1, 1, 1 }, size[3], stride[3], total = 1;
  int rank = 0, to = LUNA_MAX_RANK;
  for (int k = 0; k < op->inputs; k++)
    if (op->in[k] && op->in[k]->rank > rank) rank = op->in[k]->rank;
  for (int a = 0; a < LUNA_MAX_RANK; a++) op->arg.elementwise.shape[a] = 1;
  for (int a = rank - 1; a >= 0; a--) {
    shape[a] = 1;
    for (int k = 0; k < op->inputs; k++) {
      const int at = op->in[k] ? a - rank + op->in[k]->rank : -1;
      size[k] = 1;
      if (at >= 0) size[k] = op->in[k]->shape[at];
      if (size[k] == 1) continue;
      if (shape[a] != 1 && shape[a] != size[k]) return -1;
      shape[a] = size[k];
    }
    if (total >= 0) total = li_checked(total, shape[a]);
    if (shape[a] == 1 || total < 0) continue; /* li_finish reports it */
    bool joins = to < LUNA_MAX_RANK;
    for (int k = 0; k < op->inputs; k++) {
      stride[k] = size[k] == 1 ? 0 : count[k];
      count[k] *= size[k];
      joins = joins && stride[k] == op->arg.elementwise.stride[k][to] * op->arg.elementwise.shape[to];
    }
    if (!joins) to--;
    op->arg.elementwise.shape[to] *= shape[a];
    for (int k = 0; k < op->inputs && !joins; k++) op->arg.elementwise.stride[k][to] = stride[k];
  }
  return rank;
}

LI_HOT bool li_is_repeated(const luna_op *op, int k) { return luna_count(op->in[k]) != luna_count(op->out[0]); }

/* Computes elements [first, last) of the result or, if arg names an input, of its gradient before sums over axes. */
LI_HOT void li_elementwise_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t *shape = op->arg.elementwise.shape;
  const int input = op->arg.elementwise.input;
  const bool back = LI_TRAINS && input >= 0, repeated = back && li_is_repeated(op, input);
  float *y = back ? op->in[input]->grad : op->out[0]->data;
  li_elements e;
  if (repeated) y = (float *)op->workspace;
  e.kind = (int)op->kind;
  for (int64_t at = first; at < last; at += e.n) {
    const int64_t i = at % shape[3], row = at / shape[3];
    e.n = li_min(shape[3] - i, last - at);
    for (int k = 0; k < 3; k++) {
      const int64_t *stride = op->arg.elementwise.stride[k];
      e.step[k] = 0; /* A scalar stands for an input that is null or not read. */
      e.x[k] = &op->arg.elementwise.scalar[k];
      if (!op->in[k] || (back && !(li_ops[op->kind].reads & LUNA_READS_IN(k)))) continue;
      e.step[k] = stride[3];
      e.x[k] = op->in[k]->data + row / shape[2] / shape[1] * stride[0] + row / shape[2] % shape[1] * stride[1] +
               row % shape[2] * stride[2] + i * stride[3];
    }
    if (back) li_k(op)->elementwise_slope(&e, input, op->out[0]->grad + at, y + at,
                                          !repeated && !(op->sets >> input & 1));
    else if (op->kind == LUNA_OP_ADD && e.step[0] && e.step[1]) li_k(op)->add(e.n, e.x[0], e.x[1], y + at);
    else if (op->kind == LUNA_OP_MUL && e.step[0] && e.step[1]) li_k(op)->mul(e.n, e.x[0], e.x[1], y + at);
    else li_k(op)->elementwise(&e, y + at);
  }
}

LI_FN luna_status li_elementwise_forward(luna_op *op) {
  op->arg.elementwise.input = -1;
  return li_split(op, luna_count(op->out[0]), 1, li_elementwise_body);
}
/* A broadcast input first gets a gradient for each element of the result, in the workspace. If it equals the result's
   gradient up to sign, that is read instead. */
LI_FN bool li_gives_grad(const luna_op *op) { return li_ops[op->kind].reads == 0; }
LI_FN void li_elementwise_query(luna_op *op) {
  size_t bytes = li_bytes(luna_count(op->out[0]));
  if (!li_gives_grad(op)) bytes *= 2;
  if (LI_TRAINS && op->training) {
    for (int k = 0; k < op->inputs; k++)
      if (op->in[k]->needs_grad && li_is_repeated(op, k))
        op->backward_workspace_size = bytes;
  }
}

/* Sums the gradient over each axis on which input k is broadcast. The last sums go to the input's. */
LI_FN void li_unbroadcast(luna_op *op, int k) {
  const int64_t *stride = op->arg.elementwise.stride[k];
  const float *from = op->out[0]->grad;
  float factor = op->kind == LUNA_OP_SUB && k == 1 ? -1.0f : 1.0f;
  float *next = (float *)op->workspace;
  int64_t shape[LUNA_MAX_RANK], left = luna_count(op->out[0]) / luna_count(op->in[k]);
  if (!li_gives_grad(op)) {
    from = next;
    next += luna_count(op->out[0]);
  }
  memcpy(shape, op->arg.elementwise.shape, sizeof shape);
  for (int a = 0; a < LUNA_MAX_RANK; a++) {
    int64_t sums[3] = { 1, 1, 1 }; /* Before, at, after axis */
    if (stride[a] != 0 || shape[a] == 1) continue;
    for (int b = 0; b < LUNA_MAX_RANK; b++) sums[(b >= a) + (b > a)] *= shape[b];
    left /= shape[a];
    float *to = left == 1 ? op->in[k]->grad : next;
    if (left > 1 || (op->sets >> k & 1)) memset(to, 0, li_bytes(sums[0] * sums[2]));
    li_sum_axis(op, sums, factor, from, to);
    shape[a] = 1;
    factor = 1;
    from = to;
    next += sums[0] * sums[2];
  }
}

LI_FN luna_status li_elementwise_backward(luna_op *op) { /* dy -> da, db, dc */
  for (int k = 0; k < op->inputs; k++) {
    const bool repeated = li_is_repeated(op, k);
    if (!li_grad(op, k) || (k == 0 && op->in[0]->grad == op->out[0]->grad)) continue; /* In place */
    op->arg.elementwise.input = k;
    if (!repeated || !li_gives_grad(op)) li_split(op, luna_count(op->out[0]), 1, li_elementwise_body);
    if (repeated) li_unbroadcast(op, k);
  }
  return LUNA_OK;
}

LI_FN luna_tensor *li_elementwise(li_build *s) {
  int64_t shape[LUNA_MAX_RANK];
  const int rank = li_broadcast(&s->op, shape);
  int k;
  if (rank >= 0 || li_is_checked(s->op.ctx)) return li_finish(s, rank, shape);
  for (k = 0; k < 2; k++) { /* The message names two inputs that do not fit even without input k. */
    luna_tensor *left_out = s->op.in[k];
    s->op.in[k] = NULL;
    const bool fits = li_broadcast(&s->op, shape) >= 0;
    s->op.in[k] = left_out;
    if (!fits) break;
  }
  return li_fail(s->op.ctx, LUNA_ERROR_BROADCAST, s->name, s->op.in[k == 0], s->op.in[k == 2 ? 1 : 2]);
}
LI_FN luna_tensor *li_binary(luna_op_kind kind, const char *name, luna_tensor *a, luna_tensor *b) {
  luna_tensor *const in[] = { a, b };
  li_build s;
  if (!li_start(&s, kind, name, in, 2, 2)) return NULL;
  return li_elementwise(&s);
}
#define LI_BINARY(NAME, tier, reads, cheap, name, inputs, value, da, db, dc) \
  LUNA_API luna_tensor *luna_##name(luna_tensor *a, luna_tensor *b) { \
    if (!(inputs)) { \
      a = luna_detach(a); \
      b = luna_detach(b); \
    } \
    return li_binary(LUNA_OP_##NAME, "luna_" #name, a, b); \
  }
LUNA_BINARIES(LI_BINARY) /* Defines luna_add, luna_sub, luna_mul, luna_div, luna_less and others. */
#undef LI_BINARY
LUNA_API luna_tensor *luna_where(luna_tensor *condition, luna_tensor *a, luna_tensor *b) {
  luna_tensor *const in[] = { condition && condition->needs_grad ? luna_detach(condition) : condition, a, b };
  li_build s;
  if (!li_start(&s, LUNA_OP_WHERE, __func__, in, 3, 3)) return NULL;
  return li_elementwise(&s);
}
LUNA_API luna_tensor *luna_clamp(luna_tensor *x, float low, float high) {
  li_build s;
  if (!li_start(&s, LUNA_OP_CLAMP, __func__, &x, 1, 1)) return NULL;
  if (!(low <= high)) return li_fail(x->ctx, LUNA_ERROR_CLAMP, (double)low, (double)high);
  s.op.arg.elementwise.scalar[1] = low;
  s.op.arg.elementwise.scalar[2] = high;
  return li_elementwise(&s);
}

LUNA_API luna_tensor *luna_add_scalar(luna_tensor *x, float number) {
  li_build s;
  if (!li_start(&s, LUNA_OP_ADD, __func__, &x, 1, 1)) return NULL;
  s.op.arg.elementwise.scalar[1] = number;
  return li_elementwise(&s);
}

/* --- Scale, activation: x [...] -> y [...] --- */
LI_FN void li_same_body(luna_op *op, int64_t first, int64_t last) {
  const float *x = op->in[0]->data + first;
  float *y = op->out[0]->data + first;
  if (op->kind == LUNA_OP_SCALE) li_k(op)->scale(last - first, op->arg.scale.factor, x, y);
  else li_k(op)->activate((int)op->activation, last - first, x, y);
}
LI_FN void li_same_back(luna_op *op, int64_t first, int64_t last) {
  const float *dy = op->out[0]->grad + first;
  float *dx = op->in[0]->grad + first;
  if (op->kind == LUNA_OP_SCALE) li_k(op)->scale_add(last - first, op->arg.scale.factor, dy, dx);
  else li_k(op)->activate_grad((int)op->activation, last - first, op->in[0]->data + first, dy, true, dx);
}
LI_SPLIT_OP(same, luna_count(op->out[0]), 1)
#define LI_CPU_SCALE LI_CPU_OP(li_query_none, li_same_forward, li_same_backward, LUNA_FORWARD_IN_PLACE)
#define LI_CPU_ACTIVATION LI_CPU_OP(li_query_none, li_same_forward, li_same_backward, 0)

LUNA_API luna_tensor *luna_scale(luna_tensor *x, float factor) {
  li_build s;
  if (!li_start(&s, LUNA_OP_SCALE, __func__, &x, 1, 1)) return NULL;
  s.op.arg.scale.factor = factor;
  return li_finish_like(&s, x);
}
LUNA_API luna_tensor *luna_neg(luna_tensor *x) { return luna_scale(x, -1); }

LI_FN luna_tensor *li_fail_activation(luna_ctx *ctx, const char *name, luna_activation activation, int64_t last) {
  return li_fail(ctx, LUNA_ERROR_VALUE_RANGE, name, "activation", (int64_t)activation, (int64_t)0, last);
}
LI_FN luna_tensor *li_map(luna_tensor *x, luna_activation activation, const char *name) {
  li_build s;
  if (!li_start(&s, LUNA_OP_ACTIVATION, name, &x, 1, 1)) return NULL;
  s.op.activation = activation;
  return li_finish_like(&s, x);
}
#define LI_MAP(NAME, name, value, slope) \
  LUNA_API luna_tensor *luna_##name(luna_tensor *x) { return li_map(x, LUNA_ACTIVATION_##NAME, "luna_" #name); }
LUNA_MAPS(LI_MAP) /* Defines luna_relu, luna_gelu, luna_exp, luna_log and others. */
#undef LI_MAP
LUNA_API luna_tensor *luna_activate(luna_tensor *x, luna_activation activation) {
  if (x && (unsigned)activation >= LUNA_ACTIVATION_COUNT)
    return li_fail_activation(x->ctx, __func__, activation, LUNA_ACTIVATION_COUNT - 1);
  return li_map(x, li_activation_or(activation, LI_NO_ACTIVATION), __func__);
}

/* --- Dropout: x [...] -> y [...] --- */
LI_HOT void li_dropout_part(luna_op *op, bool back, int64_t first, int64_t last) {
  const li_dropout d = li_op_dropout(op, luna_count(op->out[0]));
  const li_way w = li_way_of(op, back);
  li_k(op)->dropout(&d, first, last - first, w.from + first, w.to + first, back);
}
LI_PART_OP(dropout, luna_count(op->in[0]), 1)
#define LI_CPU_DROPOUT LI_CPU_OP(li_query_none, li_dropout_forward, li_dropout_backward, LUNA_FORWARD_IN_PLACE)

LUNA_API luna_tensor *luna_dropout(luna_tensor *x, float probability) {
  li_build s;
  if (!x || x->ctx->bump) return x; /* Streams do not train */
  if (!li_start(&s, LUNA_OP_DROPOUT, __func__, &x, 1, 1) || li_dropout_wrong(&s, probability))
    return NULL;
  if (!LI_TRAINS || probability == 0 || !x->ctx->training) return x;
  s.op.dropout = probability;
  return li_finish_like(&s, x);
}

/* --- Mask: x [b,m,...], lengths [b] -> y [b,m,...]. Rows from lengths[b] on become 0 and are not read. --- */
LI_HOT void li_mask_part(luna_op *op, bool back, int64_t first, int64_t last) {
  const luna_tensor *x = op->in[0];
  const li_way w = li_way_of(op, back);
  const int64_t n = op->arg.mask.width;
  for (int64_t r = first; r < last; r++) {
    const bool masked = r % x->shape[1] >= op->lengths[r / x->shape[1]];
    float *to = w.to + r * n;
    if (!masked && back) li_k(op)->add(n, to, w.from + r * n, to);
    else if (!masked) memcpy(to, w.from + r * n, li_bytes(n));
    else if (!back) memset(to, 0, li_bytes(n));
  }
}

LI_PART_OP(mask, op->in[0]->shape[0] * op->in[0]->shape[1], op->arg.mask.width)
#define LI_CPU_MASK LI_CPU_OP(li_query_none, li_mask_forward, li_mask_backward, 0)

LUNA_API luna_tensor *luna_mask(luna_tensor *x, const int32_t *lengths) {
  bool full = true;
  li_build s;
  if (!li_start(&s, LUNA_OP_MASK, __func__, &x, 1, 1)) return NULL;
  if (lengths && !li_fits(&s, "x [...,m,n]")) return NULL;
  if (lengths) {
    for (int64_t b = 0; b < x->shape[0]; b++) full = full && lengths[b] >= x->shape[1];
  }
  if (full && !(lengths && x->ctx->options.measure)) return x; /* Measuring counts padding. */
  s.op.lengths = li_integers(&s, lengths, x->shape[0], 0, INT32_MAX, "lengths");
  s.op.arg.mask.width = x->shape[2] * x->shape[3];
  return li_finish_like(&s, x);
}

/* ---- Reductions ---- */
/* --- Sum, mean: x [outer,axis,inner] -> y [outer,inner] --- */
LI_FN luna_status li_reduce_forward(luna_op *op) {
  const int64_t shape[3] = { op->arg.reduce.outer, op->arg.reduce.axis, op->arg.reduce.inner };
  memset(op->out[0]->data, 0, li_bytes(shape[0] * shape[2]));
  li_sum_axis(op, shape, op->arg.reduce.factor, op->in[0]->data, op->out[0]->data);
  return LUNA_OK;
}

/* Rows [first, last) of dx [outer * axis, inner] get factor times the gradient of their group, dy [outer, inner]. If
   a row is one number, up to 256 rows of a group, which get the same number, get it at once. */
LI_HOT void li_reduce_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  const float factor = op->arg.reduce.factor, *dy = op->out[0]->grad;
  const bool set = op->sets & 1;
  float *dx = op->in[0]->grad, same[256];
  for (int64_t r = first; inner > 1 && r < last; r++) {
    if (set) li_k(op)->scale(inner, factor, dy + r / axis * inner, dx + r * inner);
    else li_k(op)->scale_add(inner, factor, dy + r / axis * inner, dx + r * inner);
  }
  for (int64_t r = first, n; inner == 1 && r < last; r += n) {
    const int64_t left_in_group = axis - r % axis;
    n = li_min(li_min(256, last - r), left_in_group);
    for (int64_t i = 0; i < n; i++) same[i] = factor * dy[r / axis];
    if (set) memcpy(dx + r, same, li_bytes(n));
    else li_k(op)->add(n, dx + r, same, dx + r);
  }
}

LI_FN luna_status li_reduce_backward(luna_op *op) {
  return li_split(op, op->arg.reduce.outer * op->arg.reduce.axis, op->arg.reduce.inner, li_reduce_back);
}
#define LI_CPU_REDUCE LI_CPU_OP(li_query_none, li_reduce_forward, li_reduce_backward, LUNA_SETS_GRAD(0))

LI_FN luna_tensor *li_reduce(luna_tensor *x, luna_op_kind kind, int axis, bool mean, const char *name) {
  int64_t shape[LUNA_MAX_RANK] = { 1, 1, 1, 1 };
  int to = 0;
  li_build s;
  if (!li_start(&s, kind, name, &x, 1, 1) || !li_has_axis(x, axis, name)) return NULL;
  const int64_t size = x->shape[axis];
  s.op.arg.reduce.outer = s.op.arg.reduce.inner = 1;
  for (int a = 0; a < x->rank; a++) {
    if (a != axis) shape[to++] = x->shape[a];
    if (a < axis) s.op.arg.reduce.outer *= x->shape[a];
    if (a > axis) s.op.arg.reduce.inner *= x->shape[a];
  }
  s.op.arg.reduce.axis = size;
  s.op.arg.reduce.factor = 1;
  if (mean && size) s.op.arg.reduce.factor /= (float)size;
  return li_finish(&s, (int)li_max(1, x->rank - 1), shape);
}

LUNA_API luna_tensor *luna_sum(luna_tensor *x, int axis) {
  return li_reduce(x, LUNA_OP_REDUCE, axis, false, __func__);
}
LUNA_API luna_tensor *luna_mean(luna_tensor *x, int axis) {
  return li_reduce(x, LUNA_OP_REDUCE, axis, true, __func__);
}
LI_FN luna_tensor *li_flat(luna_tensor *x) { return li_reshape(x, 1, luna_count(x), 1, 1, 1); }
LUNA_API luna_tensor *luna_sum_all(luna_tensor *x) {
  return li_reduce(li_flat(x), LUNA_OP_REDUCE, 0, false, __func__);
}
LUNA_API luna_tensor *luna_mean_all(luna_tensor *x) {
  return li_reduce(li_flat(x), LUNA_OP_REDUCE, 0, true, __func__);
}

/* --- Maximum: x [outer,axis,inner] -> y [outer,inner]. The gradient goes to the first of equal maxima. --- */
LI_HOT luna_status li_max_run(luna_op *op, bool back) {
  const int64_t outer = op->arg.reduce.outer, axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  const luna_tensor *x = op->in[0], *y = op->out[0];
  int64_t at;
  for (int64_t r = 0; r < outer * inner; r++) {
    const int64_t start = r / inner * axis * inner + r % inner;
    const bool found = li_first_max(x->data + start, axis, inner, &at);
    if (!back) y->data[r] = found ? x->data[start + at * inner] : 0;
    else if (found) x->grad[start + at * inner] += y->grad[r];
  }
  return LUNA_OK;
}

LI_RUN_OP(max)
#define LI_CPU_MAX LI_CPU_OP(li_query_none, li_max_forward, li_max_backward, 0)

LUNA_API luna_tensor *luna_max(luna_tensor *x, int axis) {
  return li_reduce(x, LUNA_OP_MAX, axis, false, __func__);
}

/* ---- Products ---- */
/* --- Matmul: a [outer,inner,m,k], b [inner,k,n] -> c [outer,inner,m,n]; both may be transposed. dA = dC B^T, and dB
   sums A^T dC over `outer`. --- */
LI_FN void li_multiply(const luna_op *op, const li_gemm *g, void *scratch) {
  if (g->c) li_run_gemm(li_k(op), g, &op->ctx->parallel, scratch);
}
LI_FN size_t li_larger(size_t a, size_t b) { return a > b ? a : b; }
/* Sets the workspaces for an op's products. `product` describes number 0 (forward) and numbers 1 and 2 (backward),
   whose scratch comes after `before` bytes. */
LI_FN void li_products_query(luna_op *op, void (*product)(const luna_op *op, int which, li_gemm *g), size_t before) {
  li_gemm g;
  for (int which = 0; which < (LI_TRAINS && op->training ? 3 : 1); which++) {
    product(op, which, &g);
    const size_t need = li_gemm_scratch(li_k(op), &g, op->ctx->parallel.threads);
    if (which == 0) op->workspace_size = need;
    else op->backward_workspace_size = li_larger(op->backward_workspace_size, before + need);
  }
}
LI_FN void li_matmul_batch(const luna_op *op, li_gemm *g, int64_t a, int64_t b, int64_t c) {
  g->batch[0] = op->arg.matmul.outer;
  g->batch[1] = op->arg.matmul.inner;
  g->a_batch[0] = a * op->arg.matmul.inner;
  g->a_batch[1] = a;
  g->b_batch[0] = 0;
  g->b_batch[1] = b;
  g->c_batch[0] = c * op->arg.matmul.inner;
  g->c_batch[1] = c;
}

/* Product 0 is forward's, 1 gives a's gradient, and 2 gives b's gradient for one of `outer`. */
LI_FN void li_matmul_product(const luna_op *op, int which, li_gemm *g) {
  const int64_t m = op->arg.matmul.m, n = op->arg.matmul.n, k = op->arg.matmul.k;
  const int64_t outer = op->arg.matmul.outer, inner = op->arg.matmul.inner;
  const luna_tensor *x = op->in[0], *w = op->in[1], *y = op->out[0];
  const bool at = op->arg.matmul.transpose_a, bt = op->arg.matmul.transpose_b;
  const li_matrix a = at ? li_transposed(li_dense(x->data, k, m)) : li_dense(x->data, m, k);
  const li_matrix b = bt ? li_transposed(li_dense(w->data, n, k)) : li_dense(w->data, k, n);
  const li_matrix dc = li_dense(y->grad, m, n);
  if (which == 0) {
    li_gemm_set(g, a, b, y->data);
    g->dots = op->dots;
    li_matmul_batch(op, g, m * k, k * n, m * n);
  } else if (which == 1) {
    if (at) li_gemm_set(g, b, li_transposed(dc), x->grad); /* dA^T = B dC^T */
    else li_gemm_set(g, dc, li_transposed(b), x->grad);    /* dA = dC B^T */
    li_matmul_batch(op, g, m * n, k * n, m * k);
    if (at) {
      g->a_batch[0] = 0;
      g->a_batch[1] = k * n;
      g->b_batch[0] = m * n * inner;
      g->b_batch[1] = m * n;
    }
  } else {
    if (bt) {
      li_gemm_set(g, li_transposed(dc), a, w->grad); /* dB^T = dC^T A */
      g->a_batch[1] = m * n;
      g->b_batch[1] = m * k;
    } else {
      li_gemm_set(g, li_transposed(a), dc, w->grad); /* dB = A^T dC */
      g->a_batch[1] = m * k;
      g->b_batch[1] = m * n;
    }
    g->batch[1] = inner;
    g->c_batch[1] = k * n;
  }
  if (which) g->accumulate = true;
  if (inner == 1 && !at && outer > 1) { /* All matrices of a share b, so they are multiplied as one. */
    if (which < 2) g->m *= outer;
    else g->k *= outer;
    g->batch[0] = 1;
  }
}

LI_FN void li_matmul_query(luna_op *op) { li_products_query(op, li_matmul_product, 0); }
LI_FN luna_status li_matmul_forward(luna_op *op) {
  li_gemm g;
  li_matmul_product(op, 0, &g);
  li_multiply(op, &g, op->workspace);
  return LUNA_OK;
}
LI_FN luna_status li_matmul_backward(luna_op *op) { /* dc [outer,inner,m,n] -> da [outer,inner,m,k], db [inner,k,n] */
  const int64_t inner = op->arg.matmul.inner;
  const bool one = inner == 1 && !op->arg.matmul.transpose_a; /* One product gives all of dB. */
  li_gemm g;
  li_matmul_product(op, 1, &g);
  li_multiply(op, &g, op->workspace);
  li_matmul_product(op, 2, &g);
  for (int64_t o = 0; g.c && o < (one ? 1 : op->arg.matmul.outer); o++) {
    li_multiply(op, &g, op->workspace);
    g.a += g.a_batch[1] * inner;
    g.b += g.b_batch[1] * inner;
  }
  return LUNA_OK;
}
#define LI_CPU_MATMUL LI_CPU_OP(li_matmul_query, li_matmul_forward, li_matmul_backward, 0)

LI_FN luna_tensor *li_matmul_by(luna_tensor *a, luna_tensor *b, bool transpose_a, bool transpose_b, bool dots) {
  int64_t shape[LUNA_MAX_RANK] = { 1, 1, 1, 1 };
  luna_tensor *const in[] = { a, b };
  li_build s;
  if (!li_start(&s, LUNA_OP_MATMUL, "luna_matmul", in, 2, 2)) return NULL;
  bool good = li_is_checked(a->ctx) || (a->rank >= 2 && b->rank >= 2 && b->rank <= a->rank);
  for (int i = 3; good && i <= b->rank && !li_is_checked(a->ctx); i++)
    good = a->shape[a->rank - i] == b->shape[b->rank - i];
  if (!good) return li_fail(a->ctx, LUNA_ERROR_MATMUL_AXES, a, b);
  const int64_t m = a->shape[a->rank - 2 + transpose_a], k = a->shape[a->rank - 1 - transpose_a];
  const int64_t n = b->shape[b->rank - 1 - transpose_b], kb = b->shape[b->rank - 2 + transpose_b];
  if (k != kb) return li_fail(a->ctx, LUNA_ERROR_MATMUL_INNER, a, b, k, kb);
  s.op.arg.matmul.outer = s.op.arg.matmul.inner = 1;
  for (int i = 0; i < a->rank - 2; i++) {
    shape[i] = a->shape[i];
    if (a->rank - i <= b->rank) s.op.arg.matmul.inner *= a->shape[i];
    else s.op.arg.matmul.outer *= a->shape[i];
  }
  shape[a->rank - 2] = m;
  shape[a->rank - 1] = n;
  s.op.arg.matmul.m = m;
  s.op.arg.matmul.n = n;
  s.op.arg.matmul.k = k;
  s.op.arg.matmul.transpose_a = transpose_a;
  s.op.arg.matmul.transpose_b = transpose_b;
  s.op.dots = dots;
  return li_finish(&s, a->rank, shape);
}

LUNA_API luna_tensor *luna_matmul(luna_tensor *a, luna_tensor *b, bool transpose_a, bool transpose_b) {
  return li_matmul_by(a, b, transpose_a, transpose_b, false);
}

/* --- 8-bit weights for inference --- */
#ifdef LUNA_NO_INT8
#define li_int8_ready(s, i) ((void)(s), true)
#else
/* Counts writes to a context's parameters, both its own and shared ones. */
LI_FN uint64_t li_writes(const luna_ctx *ctx) {
  uint64_t writes = ctx->writes;
  for (const luna_params *set = ctx->newest, *root; set; set = set->older) {
    for (root = set; root->shared; root = root->shared) continue;
    if (root->ctx != ctx) writes += root->ctx->writes;
  }
  return writes;
}

/* In inference, weight i gets an 8-bit copy, renewed when parameters were written. Returns false without memory. */
LI_HOT bool li_int8_ready(li_build *s, int i) {
  luna_ctx *ctx = s->op.ctx;
  luna_tensor *w = s->op.in[i];
  void *memory;
  if (!ctx->options.weights || ctx->training || ctx->bump || !w->parameter || !li_int8_fits(li_last(w)))
    return true;
  const size_t bytes = li_int8_bytes(w->shape[0], w->shape[1]);
  const uint64_t writes = li_writes(ctx);
  if (!w->int8) {
    if (!li_persist(ctx, bytes, false, &memory)) return li_refused(li_op_no_memory(s, bytes));
    w->int8 = li_int8_place(memory, w->shape[0], w->shape[1]);
  }
  if (w->int8->from == w->data && w->int8->writes == writes) return true;
  w->int8->from = w->data;
  w->int8->writes = writes;
  if (li_computes(ctx)) (void)li_int8_fill(w->int8, w->data);
  return true;
}
#endif

/* --- Linear: x [...,i], W [o,i], b [o], residual [...,o] -> y [...,o]. y = act(x W^T + b), or drop(x W^T + b) +
   residual. It keeps the activation's input. dx = dy W, dW = dy^T x, and db sums dy over the rows. --- */
/* Product 0 computes columns of y from `first` on. Products 1 and 2 give dx and dW; the argument y then holds dy. */
LI_INLINE void li_linear_columns(const luna_op *op, int which, li_matrix y, int64_t first, li_gemm *g) {
  const luna_tensor *x = op->in[0], *weight = op->in[1];
  const int64_t in = li_last(x);
  const li_matrix xs = li_dense(x->data, y.rows, in);
  const li_matrix ws = li_dense(li_offset(weight->data, first * in), y.columns, in);
  if (which == 0) {
    li_gemm_set(g, xs, li_transposed(ws), (float *)(uintptr_t)y.at);
    g->c_row = y.row;
    g->bias = li_offset(li_data(op, 2), first);
    g->b_int8 = li_op_int8(op, 1);
    g->b_first = first;
  } else if (which == 1) li_gemm_set(g, y, ws, x->grad);
  else li_gemm_set(g, li_transposed(y), xs, li_offset(weight->grad, first * in));
  g->bf16 = li_op_bf16(op);
  g->accumulate = which == 2 || (which == 1 && (first > 0 || !(op->sets & 1)));
}
LI_FN bool li_drops_last(const luna_op *op) { return LI_TRAINS && op->last_dropout > 0; }
LI_FN bool li_linear_changes(const luna_op *op) {
  return op->activation != LI_NO_ACTIVATION || li_drops_last(op);
}
LI_INLINE li_matrix li_linear_dy(const luna_op *op) {
  const float *dy = op->out[0]->grad;
  if (li_linear_changes(op)) dy = (const float *)op->workspace;
  return li_dense(dy, li_rows(op->in[0]), li_last(op->out[0]));
}
LI_FN void li_linear_product(const luna_op *op, int which, li_gemm *g) {
  li_matrix y = li_linear_dy(op);
  if (which == 0) y.at = op->out[0]->data;
  li_linear_columns(op, which, y, 0, g);
  if (which != 0) return;
  g->activation = (int)op->activation;
  if (op->kept_size) g->pre = (float *)op->kept;
  if (!(op->last_dropout > 0)) g->residual = li_data(op, 3);
  g->dots = op->dots;
}
LI_FN void li_linear_query(luna_op *op) {
  size_t slope = 0; /* It holds dy before the activation or dropout. */
  if (op->dots && !li_op_int8(op, 1)) return;
  if (li_linear_changes(op)) slope = li_round(li_bytes(luna_count(op->out[0])));
  if (op->training && op->activation != LI_NO_ACTIVATION) op->kept_size = slope;
  li_products_query(op, li_linear_product, slope);
}
/* y = drop(y) + residual */
LI_FN void li_drop_and_add(luna_op *op, int64_t first, int64_t last) {
  const li_dropout d = li_op_last_dropout(op);
  const luna_tensor *residual = li_added(op);
  float *y = op->out[0]->data + first;
  li_k(op)->dropout(&d, first, last - first, y, y, false);
  if (residual) li_k(op)->add(last - first, residual->data + first, y, y);
}
LI_FN luna_status li_linear_forward(luna_op *op) {
  li_gemm g;
  li_linear_product(op, 0, &g);
  li_multiply(op, &g, op->workspace);
  if (li_drops_last(op)) li_split(op, luna_count(op->out[0]), 1, li_drop_and_add);
  return LUNA_OK;
}
LI_FN void li_linear_slope(luna_op *op, int64_t first, int64_t last) {
  const li_dropout d = li_op_last_dropout(op);
  const float *dy = op->out[0]->grad + first;
  float *to = (float *)op->workspace + first;
  if (op->last_dropout > 0) li_k(op)->dropout(&d, first, last - first, dy, to, false);
  else li_k(op)->activate_grad((int)op->activation, last - first, (const float *)op->kept + first, dy, false, to);
}

LI_FN luna_status li_linear_backward(luna_op *op) { /* dy [...,o] -> dx [...,i], dW [o,i], db [o] */
  char *scratch = (char *)op->workspace;
  li_gemm g;
  if (li_linear_changes(op)) {
    li_split(op, luna_count(op->out[0]), 1, li_linear_slope);
    (void)li_take(&scratch, luna_count(op->out[0]));
  }
  for (int which = 1; which < 3; which++) {
    li_linear_product(op, which, &g);
    li_multiply(op, &g, scratch);
  }
  li_sum_columns(op, li_linear_dy(op), li_grad(op, 2));
  li_added_backward(op);
  return LUNA_OK;
}
#define LI_CPU_LINEAR \
  LI_CPU_OP(li_linear_query, li_linear_forward, li_linear_backward, LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(3))

LI_FN bool li_is_single_row(const luna_tensor *x) { return x->ctx->bump && x->ctx->bump->single; }

/* In a stream, a separate op adds the residual. */
LI_FN luna_tensor *li_linear_with(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                  luna_activation activation, luna_tensor *residual, float dropout) {
  luna_tensor *const in[] = { x, weight, bias, residual };
  li_build s;
  if (!li_start(&s, LUNA_OP_LINEAR, "luna_linear", in, 2, 4) ||
      !li_fits(&s, "x [...,i] weight [o,i] bias? [o] residual? [...,o]")) return NULL;
  if (x->ctx->bump && residual)
    return luna_add(residual, li_linear_with(x, weight, bias, activation, NULL, dropout));
  if (!li_int8_ready(&s, 1)) return NULL;
  s.op.dots = li_is_single_row(x);
  s.op.activation = activation;
  s.op.last_dropout = dropout;
  return li_finish_rows(&s, weight->shape[0]);
}
LI_FN luna_tensor *li_linear_activated(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                       luna_activation activation) {
  return li_linear_with(x, weight, bias, activation, NULL, 0);
}
LUNA_API luna_tensor *luna_linear(luna_tensor *x, luna_tensor *weight, luna_tensor *bias) {
  return li_linear_activated(x, weight, bias, LI_NO_ACTIVATION);
}

/* --- Feed-forward: x [...,i], W1 [f,i], b1 [f], W2 [o,f], b2 [o], residual [...,o] -> y [...,o]. y = drop2(drop(act(x
   W1^T + b1)) W2^T + b2) + residual. It works on blocks of rows, so that a block's hidden layer stays in cache. It
   keeps ReLU's output or another activation's input, or nothing with `recompute`. In forward, each thread has its own
   blocks. In backward, threads share each block: the weights' gradients are summed over blocks in order. --- */
#define LI_FFN_ROWS 256 /* All threads share 256 rows: whole AMX tiles, and an even number. */
#define LI_FFN_PARTS 8  /* Outside products, a block has parts of 32 rows, as AMX tiles have. */
typedef struct li_ffn_work {
  luna_op *op;
  int64_t first, rows, in, hidden, out;
  /* These are [rows, hidden]: `given` is the slope's argument, `active` the activation's output, `a` that after
     dropout; `dh` holds da, then dh. With `words`, rows are bf16 and `row` floats apart; else `row` is hidden. */
  bool words;
  int64_t row;
  float *given, *active, *a, *dh;
  float *dy;   /* [rows, out]: dy through dropout */
  float *sums; /* [parts, hidden + out]: dh, dy */
  /* Each product's weights are packed once for all blocks. */
  float *panels[6];
  void *scratch;
  /* In forward, `own` threads have `blocks`, and each has own_size bytes. If `own` is 1, threads share each product. */
  int64_t own, blocks;
  size_t own_size;
} li_ffn_work;

LI_FN const li_parallel *li_ffn_parallel(const li_ffn_work *w) {
  if (w->own > 1) return NULL;
  return &w->op->ctx->parallel;
}

LI_FN void li_ffn_product(const li_ffn_work *w, int which, li_gemm *g) {
  const luna_op *op = w->op;
  const int64_t n = w->rows, in = w->in, f = w->hidden, out = w->out, x = w->first * in, y = w->first * out;
  const li_matrix xs = li_dense(li_offset(op->in[0]->data, x), n, in), as = li_strided(w->a, n, f, w->row);
  const li_matrix w1 = li_dense(op->in[1]->data, f, in), w2 = li_dense(op->in[3]->data, out, f);
  const li_matrix dhs = li_strided(w->dh, n, f, w->row), dys = li_dense(w->dy, n, out);
  switch (which) {
    case 0: li_gemm_set(g, xs, li_transposed(w1), w->active); break; /* h */
    case 1: li_gemm_set(g, as, li_transposed(w2), li_offset(op->out[0]->data, y)); break; /* y */
    case 2: li_gemm_set(g, li_transposed(dys), as, op->in[3]->grad); break; /* dW2 */
    case 3: li_gemm_set(g, dys, w2, w->dh); break; /* da */
    case 4: li_gemm_set(g, li_transposed(dhs), xs, op->in[1]->grad); break; /* dW1 */
    default: li_gemm_set(g, dhs, w1, li_offset(op->in[0]->grad, x)); break; /* dx */
  }
  if (which < 2) {
    g->bias = li_data(op, 2 + 2 * which);
    g->b_int8 = li_op_int8(op, 1 + 2 * which);
  }
  if (which == 0) g->activation = (int)op->activation;
  if (which == 0 && op->activation != LUNA_ACTIVATION_RELU) g->pre = w->given;
  if (which == 1 && !(op->last_dropout > 0)) g->residual = li_offset(li_data(op, 5), y);
  g->accumulate = which == 2 || which == 4 || (which == 5 && !(op->sets & 1));
  g->bf16 = li_op_bf16(op);
  g->b_panels = w->panels[which];
  if (!w->words) return;
  g->a_words = which == 1 || which >= 4;
  g->b_words = which == 2;
  if (which == 0 || which == 3) g->words_row = w->row;
  if (which == 0) g->words = w->active;
  if (which != 3) return;
  g->words = w->dh;
  g->slope = w->active;
  g->sums = w->sums;
  g->sums_row = f + out;
}

LI_FN void li_ffn_multiply(const li_ffn_work *w, int which) {
  li_gemm g;
  li_ffn_product(w, which, &g);
  if (g.c) li_run_gemm(li_k(w->op), &g, li_ffn_parallel(w), w->scratch);
}
/* With tiles, the hidden layer of ReLU and its gradient are stored as the words that products read. */
LI_FN bool li_ffn_words(const luna_op *op) {
  return li_op_bf16(op) && li_k(op)->words && li_k(op)->words->word_panels && !li_op_int8(op, 1) &&
         op->activation == LUNA_ACTIVATION_RELU && !(op->dropout > 0) && li_last(op->in[3]) % 32 == 0;
}
/* In words, rows of the hidden layer are an odd number of cache lines apart. */
LI_FN int64_t li_ffn_row(const luna_op *op) {
  const int64_t hidden = li_last(op->in[3]);
  if (!li_ffn_words(op)) return hidden;
  return hidden / 2 + (hidden % 64 == 0) * 16;
}
/* Returns how many rows a product multiplies at a time. A thread's own blocks have a multiple of that. */
LI_FN int64_t li_ffn_tile(const luna_op *op) {
  const li_kernels *kernels = li_k(op);
#ifndef LUNA_NO_INT8
  if (li_op_int8(op, 1) && kernels->int8) return kernels->int8->qm;
#endif
  return li_op_bf16(op) && kernels->words ? kernels->words->rows : kernels->mr;
}

/* Products 0 and 1 read weights in forward, 3 and 5 in backward, and 0 also in backward if nothing was kept. */
LI_FN bool li_ffn_reads_weights(int which, bool backward, bool keeps) {
  if (!backward) return which < 2;
  return which == 3 || which == 5 || (which == 0 && !keeps);
}

/* Sets the sizes and the layout in the workspace, and returns its bytes. */
LI_FN size_t li_ffn_start(li_ffn_work *w, luna_op *op, bool backward, void *workspace) {
  char *at = workspace ? (char *)workspace : (char *)w; /* Null: only offsets count */
  char *const start = at;
  const bool keeps = op->kept_size > 0, relu = op->activation == LUNA_ACTIVATION_RELU;
  const int64_t rows = li_rows(op->in[0]), tile = li_ffn_tile(op);
  size_t scratch = 0;
  li_gemm g;
  memset(w, 0, sizeof *w);
  w->op = op;
  w->own = 1;
  w->rows = LI_FFN_ROWS;
  if (!backward && rows > LI_FFN_ROWS) w->own = li_max(1, op->ctx->parallel.threads);
  if (w->own > 1) w->rows = li_max(4, LI_FFN_ROWS / w->own / tile) * tile;
  w->blocks = w->own * li_divide_up(rows, w->own * w->rows);
  w->rows = li_min(w->rows, rows);
  w->in = li_last(op->in[0]);
  w->hidden = li_last(op->in[3]);
  w->out = li_last(op->out[0]);
  w->words = li_ffn_words(op);
  w->row = li_ffn_row(op);
  for (int which = 0; which < 6 && w->rows < rows; which++) {
    if (!li_ffn_reads_weights(which, backward, keeps)) continue;
    w->panels[which] = (float *)(void *)at;
    li_ffn_product(w, which, &g);
    at += li_panels_bytes(li_k(op), &g);
    if (workspace) li_run_make_panels(li_k(op), &g, &op->ctx->parallel, w->panels[which]);
  }
  char *const own = at;
  const int64_t size = w->rows * w->row;
  if (!keeps || !relu) w->active = li_take(&at, size);
  if (!keeps && !relu && backward) w->given = li_take(&at, size);
  if (op->dropout > 0) w->a = li_take(&at, size);
  if (backward) w->dh = li_take(&at, size);
  if (backward && op->last_dropout > 0) w->dy = li_take(&at, w->rows * w->out);
  if (backward) w->sums = li_take(&at, LI_FFN_PARTS * (w->hidden + w->out));
  w->scratch = at;
  for (int which = 0; which < (backward ? 6 : 2); which++) {
    li_ffn_product(w, which, &g);
    scratch = li_larger(scratch, li_gemm_scratch(li_k(op), &g, w->own > 1 ? 1 : op->ctx->parallel.threads));
  }
  w->own_size = li_round((size_t)(at - own) + scratch);
  return (size_t)(own - start) + (size_t)w->own * w->own_size;
}

/* Moves to the block of rows [first, last); returns false if it is empty. */
LI_FN bool li_ffn_next(li_ffn_work *w, int64_t first, int64_t last) {
  const luna_op *op = w->op;
  const bool relu = op->activation == LUNA_ACTIVATION_RELU;
  float *kept = NULL;
  if (op->kept_size) kept = (float *)op->kept + first * w->row;
  w->first = first;
  w->rows = li_min(last, li_rows(op->in[0])) - first;
  if (kept && relu) w->active = kept;
  if (kept && !relu) w->given = kept;
  if (relu) w->given = w->active;
  if (!(op->dropout > 0)) w->a = w->active;
  if (!(op->last_dropout > 0) && op->out[0]->grad) w->dy = op->out[0]->grad + first * w->out;
  return w->rows > 0;
}

LI_FN void li_feed_forward_query(luna_op *op) {
  li_ffn_work w;
  op->kept_size = 0;
  if (op->training && !op->arg.feed_forward.recompute)
    op->kept_size = li_bytes(li_rows(op->in[0]) * li_ffn_row(op));
  op->workspace_size = li_ffn_start(&w, op, false, NULL);
  op->backward_workspace_size = li_ffn_start(&w, op, true, NULL);
}
LI_FN void li_ffn_drop(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_ffn_work *w = (const li_ffn_work *)work;
  const li_dropout d = li_op_dropout(w->op, li_rows(w->op->in[0]) * w->hidden);
  const int64_t at = first * w->hidden, n = (last - first) * w->hidden;
  (void)thread;
  li_k(w->op)->dropout(&d, w->first * w->hidden + at, n, w->active + at, w->a + at, false);
}
LI_FN void li_ffn_result(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_ffn_work *w = (const li_ffn_work *)work;
  (void)thread;
  li_drop_and_add(w->op, (w->first + first) * w->out, (w->first + last) * w->out);
}
LI_FN void li_ffn_block(li_ffn_work *w) {
  li_ffn_multiply(w, 0);
  if (w->op->dropout > 0) li_each(li_ffn_parallel(w), w->rows, li_ffn_drop, w);
  li_ffn_multiply(w, 1);
  if (w->op->last_dropout > 0) li_each(li_ffn_parallel(w), w->rows, li_ffn_result, w);
}
LI_FN void li_ffn_blocks(void *work, int64_t thread, int64_t first, int64_t last) {
  li_ffn_work w = *(const li_ffn_work *)work;
  const int64_t tile = li_ffn_tile(w.op), tiles = li_divide_up(li_rows(w.op->in[0]), tile);
  const int64_t skip = thread * (int64_t)(w.own_size / sizeof(float));
  w.active = li_offset(w.active, skip);
  w.a = li_offset(w.a, skip);
  w.scratch = (float *)w.scratch + skip;
  for (int64_t i = first; i < last; i++) {
    li_ffn_work block = w;
    if (li_ffn_next(&block, li_share(tiles, i, w.blocks) * tile, li_share(tiles, i + 1, w.blocks) * tile))
      li_ffn_block(&block);
  }
}

LI_FN luna_status li_feed_forward_forward(luna_op *op) {
  li_ffn_work w;
  li_ffn_start(&w, op, false, op->workspace);
  if (w.own > 1) li_each(&op->ctx->parallel, w.blocks, li_ffn_blocks, &w);
  else {
    for (int64_t first = 0; li_ffn_next(&w, first, first + LI_FFN_ROWS); first += LI_FFN_ROWS)
      li_ffn_block(&w);
  }
  return LUNA_OK;
}
#ifndef LUNA_NO_TRAIN
/* Makes a and dy, which the gradients' products read. */
LI_FN void li_ffn_before(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_ffn_work *w = (const li_ffn_work *)work;
  const luna_op *op = w->op;
  const li_dropout d = li_op_last_dropout(op);
  int64_t at = first * w->hidden, n = (last - first) * w->hidden;
  if (op->kept_size && w->given != w->active)
    li_k(op)->activate((int)op->activation, n, w->given + at, w->active + at);
  if (op->dropout > 0) li_ffn_drop(work, thread, first, last);
  if (!(op->last_dropout > 0)) return;
  at = first * w->out;
  n = (last - first) * w->out;
  li_k(op)->dropout(&d, w->first * w->out + at, n, op->out[0]->grad + w->first * w->out + at, w->dy + at, false);
}

/* Turns da into dh. For the biases, each part of the block leaves column sums in w->sums. With words, the product has
   done this. */
LI_FN void li_ffn_slope(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_ffn_work *w = (const li_ffn_work *)work;
  const luna_op *op = w->op;
  const int64_t f = w->hidden, out = w->out;
  const li_dropout d = li_op_dropout(op, li_times(li_rows(op->in[0]), f));
  (void)thread;
  for (int64_t part = first; part < last; part++) {
    float *sums = w->sums + part * (f + out);
    const int64_t row = li_share(w->rows, part, LI_FFN_PARTS);
    const int64_t rows = li_share(w->rows, part + 1, LI_FFN_PARTS) - row;
    const int64_t at = row * f, n = rows * f;
    float *dh = w->dh + at;
    if (op->dropout > 0) li_k(op)->dropout(&d, w->first * f + at, n, dh, dh, false);
    if (!w->words) li_k(op)->activate_grad((int)op->activation, n, w->given + at, dh, false, dh);
    if (!w->words && li_grad(op, 2)) li_k(op)->sum_rows(li_dense(dh, rows, f), 1.0f, sums);
    if (li_grad(op, 4)) li_k(op)->sum_rows(li_dense(w->dy + row * out, rows, out), 1.0f, sums + f);
  }
}

/* `dx` may share the memory of dy, so dx is written last. */
LI_FN luna_status li_feed_forward_backward(luna_op *op) { /* dy [...,o] -> dx [...,i], dW1 [f,i], dW2 [o,f] */
  const li_parallel *parallel = &op->ctx->parallel;
  li_ffn_work w;
  li_ffn_start(&w, op, true, op->workspace);
  li_added_backward(op);
  for (int64_t first = 0; li_ffn_next(&w, first, first + LI_FFN_ROWS); first += LI_FFN_ROWS) {
    if (!op->kept_size) li_ffn_multiply(&w, 0);
    if (op->dropout > 0 || op->last_dropout > 0 || (op->kept_size && op->activation != LUNA_ACTIVATION_RELU))
      li_each(parallel, w.rows, li_ffn_before, &w);
    li_clear(w.sums, li_bytes(LI_FFN_PARTS * (w.hidden + w.out)));
    for (int which = 2; which < 4; which++) li_ffn_multiply(&w, which);
    li_each(parallel, LI_FFN_PARTS, li_ffn_slope, &w);
    const li_matrix sums = li_dense(w.sums, LI_FFN_PARTS, w.hidden + w.out);
    li_sum_columns(op, li_columns(sums, 0, w.hidden), li_grad(op, 2));
    li_sum_columns(op, li_columns(sums, w.hidden, w.hidden + w.out), li_grad(op, 4));
    for (int which = 4; which < 6; which++) li_ffn_multiply(&w, which);
  }
  return LUNA_OK;
}
#endif
#define LI_CPU_FEED_FORWARD \
  LI_CPU_OP(li_feed_forward_query, li_feed_forward_forward, li_feed_forward_backward, \
      LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(5) | LUNA_ADDS_IN_PLACE(0))

LUNA_API luna_tensor *luna_feed_forward(luna_tensor *x, luna_tensor *w1, luna_tensor *b1, luna_tensor *w2,
                                        luna_tensor *b2, const luna_feed_forward_config *config) {
  static const luna_feed_forward_config defaults = { LUNA_ACTIVATION_DEFAULT, 0, 0, NULL, false, NULL, NULL };
  const luna_feed_forward_config *c = config ? config : &defaults;
  const luna_activation activation = li_activation_or(c->activation, LUNA_ACTIVATION_RELU);
  luna_tensor *const in[] = { x, w1, b1, w2, b2, c->residual, c->gate, c->gate ? c->gate_bias : NULL };
  li_build s;
  if (!li_start(&s, LUNA_OP_FEED_FORWARD, __func__, in, 2, 8) ||
      li_dropout_wrong(&s, c->dropout) || li_dropout_wrong(&s, c->activation_dropout)) return NULL;
  if (!li_is_checked(x->ctx)) {
    if (!li_is_activation(c->activation))
      return li_fail_activation(x->ctx, s.name, c->activation, LUNA_ACTIVATION_NONE);
    if (!li_fits(&s, "x [...,i] w1 [f,i] b1? [f] w2 [o,f] b2? [o] residual? [...,o] gate? [f,i] gate_bias? [f]") ||
        !li_product_fits(&s, li_rows(x), w1->shape[0], LI_MAX_COUNT)) return NULL;
  }
  /* The op has no gate, a stream's single rows need luna_linear's dot products, and a device may lack the op. */
  if (c->gate || x->ctx->bump || !li_has_op(x, LUNA_OP_FEED_FORWARD)) {
    const luna_scope scope = c->recompute ? luna_scope_recompute(x->ctx) : luna_scope_begin(x->ctx);
    luna_tensor *y = li_linear_activated(x, w1, b1, activation);
    if (c->gate) y = luna_mul(y, luna_linear(x, c->gate, c->gate_bias));
    y = luna_dropout(luna_linear(luna_dropout(y, c->activation_dropout), w2, b2), c->dropout);
    if (c->residual) y = luna_add(c->residual, y);
    return li_result(scope, y);
  }
  if (!li_int8_ready(&s, 1) || !li_int8_ready(&s, 3)) return NULL;
  s.op.inputs = 6; /* No gate */
  s.op.activation = activation;
  s.op.dropout = c->activation_dropout;
  s.op.last_dropout = c->dropout;
  s.op.arg.feed_forward.recompute = c->recompute;
  return li_finish_rows(&s, w2->shape[0]);
}

/* ---- Ops on rows ---- */
/* --- Softmax: x [...,n] -> y [...,n]. `lengths` masks the last axis by axis 0. --- */
LI_HOT int64_t li_softmax_width(const luna_op *op, int64_t row) {
  const luna_tensor *x = op->in[0];
  const int64_t n = li_last(x);
  if (!op->lengths) return n;
  return li_min(n, op->lengths[row / (li_rows(x) / x->shape[0])]);
}
LI_HOT void li_softmax_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = li_last(op->in[0]);
  for (int64_t r = first; r < last; r++) {
    const int64_t width = li_softmax_width(op, r);
    li_k(op)->softmax(1, width, op->in[0]->data + r * n, op->out[0]->data + r * n);
    memset(op->out[0]->data + r * n + width, 0, li_bytes(n - width));
  }
}
LI_HOT void li_softmax_back(luna_op *op, int64_t first, int64_t last) { /* dy [...,n] -> dx [...,n] */
  const int64_t n = li_last(op->in[0]);
  for (int64_t r = first; r < last; r++)
    li_k(op)->softmax_backward(1, li_softmax_width(op, r), op->out[0]->data + r * n, op->out[0]->grad + r * n,
                               op->in[0]->grad + r * n);
}
LI_SPLIT_OP(softmax, li_rows(op->in[0]), li_last(op->in[0]))
#define LI_CPU_SOFTMAX LI_CPU_OP(li_query_none, li_softmax_forward, li_softmax_backward, 0)

LUNA_API luna_tensor *luna_softmax(luna_tensor *x, const int32_t *lengths) {
  li_build s;
  if (!li_start(&s, LUNA_OP_SOFTMAX, __func__, &x, 1, 1) ||
      !li_fits(&s, lengths ? "x [...,m,n]" : "x [...,n]")) return NULL;
  s.op.lengths = li_integers(&s, lengths, x->shape[0], 0, INT32_MAX, "lengths");
  return li_finish_like(&s, x);
}

/* --- Log softmax: x [...,n] -> y [...,n]. y = z - ln sum e^z with z = x - max x; dx = dy - e^y sum dy. --- */
LI_FN void li_log_softmax_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = li_last(op->in[0]);
  float exps[256], subtrahend;
  li_elements minus = { LUNA_OP_SUB, 0, { NULL, NULL, NULL }, { 1, 0, 0 } }; /* x[0][i] - x[1][0]; no x[2] */
  int64_t at;
  minus.n = n;
  minus.x[1] = minus.x[2] = &subtrahend;
  for (int64_t r = first; r < last; r++) {
    const float *x = op->in[0]->data + r * n;
    float *y = op->out[0]->data + r * n;
    double sum = 0;
    (void)li_first_max(x, n, 1, &at);
    subtrahend = x[at];
    minus.x[0] = x;
    li_k(op)->elementwise(&minus, y); /* z */
    for (int64_t i = 0; i < n; i += 256) {
      li_k(op)->activate(LUNA_ACTIVATION_EXP, li_min(256, n - i), y + i, exps);
      sum += li_k(op)->sum(li_min(256, n - i), exps);
    }
    subtrahend = li_log1_scalar((float)sum);
    minus.x[0] = y;
    li_k(op)->elementwise(&minus, y);
  }
}

LI_FN void li_log_softmax_back(luna_op *op, int64_t first, int64_t last) { /* dy [...,n] -> dx [...,n] */
  const int64_t n = li_last(op->in[0]);
  for (int64_t r = first; r < last; r++) {
    const float *y = op->out[0]->data + r * n, *dy = op->out[0]->grad + r * n;
    const float sum = (float)li_k(op)->sum(n, dy);
    float *dx = op->in[0]->grad + r * n, part[256];
    li_k(op)->add(n, dx, dy, dx);
    for (int64_t i = 0; i < n; i += 256) {
      li_k(op)->activate(LUNA_ACTIVATION_EXP, li_min(256, n - i), y + i, part);
      li_k(op)->scale_add(li_min(256, n - i), -sum, part, dx + i);
    }
  }
}

LI_SPLIT_OP(log_softmax, li_rows(op->in[0]), li_last(op->in[0]))
#define LI_CPU_LOG_SOFTMAX LI_CPU_OP(li_query_none, li_log_softmax_forward, li_log_softmax_backward, 0)

LUNA_API luna_tensor *luna_log_softmax(luna_tensor *x) {
  int64_t shape[LUNA_MAX_RANK];
  li_build s;
  if (!li_start(&s, LUNA_OP_LOG_SOFTMAX, __func__, &x, 1, 1) || !li_fits(&s, "x [...,N]")) return NULL;
  if (li_has_op(x, LUNA_OP_LOG_SOFTMAX)) return li_finish_like(&s, x);
  const int axis = x->rank - 1;
  memcpy(shape, x->shape, sizeof shape);
  shape[axis] = 1;
  luna_tensor *z = luna_sub(x, luna_detach(luna_reshape(luna_max(x, axis), x->rank, shape)));
  return luna_sub(z, luna_log(luna_reshape(luna_sum(luna_exp(z), axis), x->rank, shape)));
}

/* --- Layer norm: x [...,n], weight [n], bias [n] -> y [...,n]. It keeps each row's mean and 1/deviation. Backward
   works on blocks of rows. A cached block's column sums for dweight, dbias go to the workspace [blocks, 2, n]. --- */
#define LI_NORM_ROWS 64
LI_FN void li_layer_norm_query(luna_op *op) {
  if (op->training) op->kept_size = li_bytes(li_rows(op->in[0]) * 2);
  op->backward_workspace_size = li_bytes(li_divide_up(li_rows(op->in[0]), LI_NORM_ROWS) * 2 * li_last(op->in[0]));
}

LI_FN li_layer_norm li_layer_norm_of(const luna_op *op, int64_t first, int64_t last) {
  const int64_t n = li_last(op->in[0]), rows = li_rows(op->in[0]);
  float *kept = (float *)op->kept;
  li_layer_norm a;
  memset(&a, 0, sizeof a);
  a.rms = op->arg.norm.rms;
  a.epsilon = op->arg.norm.epsilon;
  a.rows = last - first;
  a.n = n;
  a.x = li_offset(op->in[0]->data, first * n);
  a.weight = li_data(op, 1);
  a.bias = li_data(op, 2);
  a.y = li_offset(op->out[0]->data, first * n);
  if (LI_TRAINS && kept) {
    a.mean = kept + first;
    a.rstd = kept + rows + first;
  }
  return a;
}

LI_FN void li_layer_norm_body(luna_op *op, int64_t first, int64_t last) {
  const li_layer_norm a = li_layer_norm_of(op, first, last);
  li_k(op)->layer_norm(&a);
}

LI_FN void li_layer_norm_back(luna_op *op, int64_t first, int64_t last) { /* dy [...,n] -> dx [...,n], dw, db [n] */
  for (; first < last; first++) {
    const int64_t row = first * LI_NORM_ROWS;
    li_layer_norm a = li_layer_norm_of(op, row, li_min(row + LI_NORM_ROWS, li_rows(op->in[0])));
    float *sums = (float *)op->workspace + first * 2 * a.n;
    a.dy = op->out[0]->grad + row * a.n;
    a.dx = li_offset(op->in[0]->grad, row * a.n);
    a.add = !(op->sets & 1) && a.dx != a.dy;
    if (li_grad(op, 1)) a.dweight = sums;
    if (li_grad(op, 2)) a.dbias = sums + a.n;
    if (a.dweight || a.dbias) {
      memset(sums, 0, li_bytes(2 * a.n));
      li_k(op)->layer_norm_weights(&a, 0, a.n);
    }
    if (a.dx) li_k(op)->layer_norm_backward(&a);
  }
}

LI_FN luna_status li_layer_norm_forward(luna_op *op) {
  return li_split(op, li_rows(op->in[0]), li_last(op->in[0]), li_layer_norm_body);
}
LI_FN luna_status li_layer_norm_backward(luna_op *op) {
  const int64_t n = li_last(op->in[0]), blocks = li_divide_up(li_rows(op->in[0]), LI_NORM_ROWS);
  const li_matrix sums = li_dense((const float *)op->workspace, blocks, 2 * n);
  li_split(op, blocks, LI_NORM_ROWS * n, li_layer_norm_back);
  li_sum_columns(op, li_columns(sums, 0, n), li_grad(op, 1));
  li_sum_columns(op, li_columns(sums, n, 2 * n), li_grad(op, 2));
  return LUNA_OK;
}
#define LI_CPU_LAYER_NORM \
  LI_CPU_OP(li_layer_norm_query, li_layer_norm_forward, li_layer_norm_backward, \
      LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(0))

LI_FN luna_tensor *li_norm(luna_tensor *const in[3], float epsilon, bool rms, const char *name) {
  li_build s;
  if (!li_start(&s, LUNA_OP_LAYER_NORM, name, in, 1, 3) || !li_fits(&s, "x [...,d] weight? [d] bias? [d]")) return NULL;
  if (!(epsilon >= 0 && li_is_finite(epsilon)))
    return li_fail(in[0]->ctx, LUNA_ERROR_EPSILON, name, (double)epsilon);
  s.op.arg.norm.rms = rms;
  s.op.arg.norm.epsilon = epsilon;
  if (epsilon == 0) s.op.arg.norm.epsilon = LI_NORM_EPSILON;
  return li_finish_like(&s, in[0]);
}
LUNA_API luna_tensor *luna_layer_norm(luna_tensor *x, luna_tensor *weight, luna_tensor *bias, float epsilon) {
  luna_tensor *const in[] = { x, weight, bias };
  return li_norm(in, epsilon, false, __func__);
}
LUNA_API luna_tensor *luna_rms_norm(luna_tensor *x, luna_tensor *weight, float epsilon) {
  luna_tensor *const in[] = { x, weight, NULL };
  return li_norm(in, epsilon, true, __func__);
}

/* --- Ratio: x [...,n + 1] -> y [...,n]. A row's first n numbers are divided by its last, z; y is 0 if that is 0.
   dx = dy / z; dz = -(sum dy y) / z. --- */
/* If the divisor is 0, or so small that its inverse is Inf, numbers are divided one by one. */
LI_HOT float li_ratio_of(float x, float divisor) { return divisor == 0 ? 0 : x / divisor; }
LI_HOT void li_ratio_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = li_last(op->out[0]);
  for (int64_t r = first; r < last; r++) {
    const float *x = op->in[0]->data + r * (n + 1), inverse = 1 / x[n];
    float *y = op->out[0]->data + r * n;
    if (li_is_finite(inverse)) li_k(op)->scale(n, inverse, x, y);
    else
      for (int64_t i = 0; i < n; i++) y[i] = li_ratio_of(x[i], x[n]);
  }
}

LI_HOT void li_ratio_back(luna_op *op, int64_t first, int64_t last) { /* dy [...,n] -> dx [...,n + 1] */
  const int64_t n = li_last(op->out[0]);
  for (int64_t r = first; r < last; r++) {
    const float *x = op->in[0]->data + r * (n + 1), *dy = op->out[0]->grad + r * n;
    const float inverse = 1 / x[n], dot = li_k(op)->dot(n, dy, op->out[0]->data + r * n);
    float *dx = op->in[0]->grad + r * (n + 1);
    if (li_is_finite(inverse)) li_k(op)->scale_add(n, inverse, dy, dx);
    else
      for (int64_t i = 0; i < n; i++) dx[i] += li_ratio_of(dy[i], x[n]);
    dx[n] -= li_is_finite(inverse) ? inverse * dot : li_ratio_of(dot, x[n]);
  }
}
LI_SPLIT_OP(ratio, li_rows(op->in[0]), li_last(op->in[0]))
#define LI_CPU_RATIO LI_CPU_OP(li_query_none, li_ratio_forward, li_ratio_backward, 0)

LUNA_API luna_tensor *luna_ratio(luna_tensor *x) {
  li_build s;
  if (!li_start(&s, LUNA_OP_RATIO, __func__, &x, 1, 1) || !li_fits(&s, "x [...,N]")) return NULL;
  return li_finish_rows(&s, li_last(x) - 1);
}

/* ---- Positions ---- */
/* --- Sinusoids: -> y [n,d]; rotary: x [b,n,heads d] -> y [b,n,heads d] --- */
/* Row i has the sines, then the cosines, of position first + i. An angle is the sum of its block's angle and the angle
   of the place in the block, so that a row's bits do not depend on `first`. */
#define LI_ANGLES 64
typedef struct li_angles {
  int64_t first, rows, d;
  double rate;
  double *places; /* Sines, cosines [li_angles_places, d/2, 2] */
  float *out; /* [rows, d] */
} li_angles;
LI_FN int64_t li_angles_places(const li_angles *a) {
  return li_min(a->first % LI_ANGLES + a->rows, LI_ANGLES);
}
LI_HOT size_t li_angles_room(const li_angles *a) {
  return li_round((size_t)(li_angles_places(a) * (a->d / 2)) * 2 * sizeof(double));
}
LI_HOT li_angles li_angles_of(const luna_op *op) {
  const luna_tensor *y = op->out[0];
  li_angles a = { op->arg.sinusoids.first, y->shape[0], li_last(y), 0, (double *)op->workspace, y->data };
  if (op->kind != LUNA_OP_ROTARY) {
    a.rate = li_sinusoid_rate(a.d / 2);
    return a;
  }
  a.first = op->arg.rotary.first;
  a.rows = y->shape[1];
  a.d /= op->arg.rotary.heads;
  a.rate = log((double)op->arg.rotary.base) / (double)(a.d / 2);
  if (op->workspace) a.out = (float *)(void *)((char *)op->workspace + li_angles_room(&a));
  return a;
}

LI_HOT void li_angles_place(luna_op *op, int64_t first, int64_t last) {
  const li_angles a = li_angles_of(op);
  const int64_t half = a.d / 2;
  for (int64_t t = first; t < last; t++)
    for (int64_t i = 0; i < half; i++) {
      double *at = a.places + (t * half + i) * 2;
      li_sine((double)t * li_frequency(i, a.rate), &at[0], &at[1]);
    }
}

/* Makes the rows of blocks [first, last): sin(a + b) = sin a cos b + cos a sin b, and the cosine likewise. */
LI_HOT void li_angles_block(luna_op *op, int64_t first, int64_t last) {
  const li_angles a = li_angles_of(op);
  const int64_t half = a.d / 2;
  for (int64_t block = a.first / LI_ANGLES + first; first < last; first++, block++) {
    const int64_t start = block * LI_ANGLES, from = li_max(a.first - start, 0);
    const int64_t to = li_min(a.first + a.rows - start, LI_ANGLES);
    float *rows = a.out + (start - a.first) * a.d;
    for (int64_t i = 0; i < half; i++) {
      double s, c;
      li_sine((double)start * li_frequency(i, a.rate), &s, &c);
      for (int64_t j = from; j < to; j++) {
        const double *place = a.places + (j * half + i) * 2;
        rows[j * a.d + i] = (float)(s * place[1] + c * place[0]);
        rows[j * a.d + half + i] = (float)(c * place[1] - s * place[0]);
      }
    }
    if (a.d % 2)
      for (int64_t j = from; j < to; j++) rows[j * a.d + a.d - 1] = 0;
  }
}

LI_FN luna_status li_angles_make(luna_op *op) {
  const li_angles a = li_angles_of(op);
  const int64_t blocks = li_divide_up(a.first % LI_ANGLES + a.rows, LI_ANGLES);
  if (a.rows == 0) return LUNA_OK;
  li_split(op, li_angles_places(&a), a.d, li_angles_place);
  return li_split(op, blocks, LI_ANGLES * a.d, li_angles_block);
}

LI_FN void li_sinusoids_query(luna_op *op) {
  const li_angles a = li_angles_of(op);
  op->workspace_size = li_angles_room(&a);
}
#define LI_CPU_SINUSOIDS LI_CPU_OP(li_sinusoids_query, li_angles_make, NULL, 0) /* No input */

LI_FN void li_rotary_query(luna_op *op) {
  const li_angles a = li_angles_of(op);
  op->workspace_size = li_angles_room(&a) + li_bytes(a.rows * a.d);
  op->backward_workspace_size = op->workspace_size;
}

/* Each pair (x_i, x_(i + d/2)) of a head is turned by its angle, and backward turns the gradient back. */
LI_HOT void li_rotary_rows_part(luna_op *op, bool back, int64_t first, int64_t last) {
  const li_angles a = li_angles_of(op);
  const li_way w = li_way_of(op, back);
  const int64_t heads = op->arg.rotary.heads, half = a.d / 2;
  for (int64_t head = first * heads; head < last * heads; head++) {
    const float *s = a.out + head / heads % a.rows * a.d, *c = s + half;
    const float *x = w.from + head * a.d;
    float *y = w.to + head * a.d;
    for (int64_t i = 0; i < half; i++) {
      const float sine = back ? -s[i] : s[i];
      const float upper = x[i] * c[i] - x[half + i] * sine, lower = x[half + i] * c[i] + x[i] * sine;
      y[i] = back ? y[i] + upper : upper;
      y[half + i] = back ? y[half + i] + lower : lower;
    }
  }
}
LI_PART_OP(rotary_rows, li_rows(op->in[0]), li_last(op->in[0]))
LI_FN luna_status li_rotary_forward(luna_op *op) {
  li_angles_make(op);
  return li_rotary_rows_forward(op);
}
LI_FN luna_status li_rotary_backward(luna_op *op) { /* dy -> dx [b,n,heads d] */
  li_angles_make(op);
  return li_rotary_rows_backward(op);
}
#define LI_CPU_ROTARY LI_CPU_OP(li_rotary_query, li_rotary_forward, li_rotary_backward, 0)

LUNA_API luna_tensor *luna_rotary(luna_tensor *x, int64_t heads, int64_t first, float base) {
  li_build s;
  if (!li_start(&s, LUNA_OP_ROTARY, __func__, &x, 1, 1) || !li_fits(&s, "x [b,n,D]") ||
      !li_heads_fit(&s, heads) || !li_in(x->ctx, s.name, "first", first, 0, INT32_MAX)) return NULL;
  if (x->shape[2] / heads % 2 != 0) return li_fail(x->ctx, LUNA_ERROR_ROTARY_ODD, s.name, x->shape[2] / heads);
  if (!(base >= 0 && li_is_finite(base))) return li_fail(x->ctx, LUNA_ERROR_ROTARY_BASE, (double)base);
  s.op.arg.rotary.heads = heads;
  s.op.arg.rotary.first = first;
  s.op.arg.rotary.base = base;
  if (base == 0) s.op.arg.rotary.base = 10000;
  return li_finish_like(&s, x);
}

/* ---- Attention ---- */
/* --- Softmax attention [eq. 1]: q [b,n,d], k [b,m,d], v [b,m,e] -> y [b,n,e] and, if asked, row sums or log-sum-exp
   [b,n,h]. luna_pack [eq. 3] passes weights as q and context as k and v, with one head and scale 1. --- */
LI_FN void li_attention_args(const luna_op *op, li_attention *a) {
  const luna_tensor *q = op->in[0], *k = op->in[1], *v = op->in[op->inputs - 1];
  memset(a, 0, sizeof *a);
  a->q = q->data;
  a->k = k->data;
  a->v = v->data;
  a->out = op->out[0]->data;
  a->log_sum_exp = (float *)op->kept;
  a->heads = op->arg.attention.heads;
  a->batch = op->arg.attention.batch;
  a->queries = op->arg.attention.queries;
  a->keys = op->arg.attention.keys;
  a->q_row = li_last(q);
  a->k_row = li_last(k);
  a->v_row = li_last(v);
  a->q_head = a->k_head = a->head_dim = a->q_row / a->heads;
  a->v_head = a->out_head = a->value_dim = a->v_row / a->heads;
  a->out_row = a->v_row;
  if (!op->query_offsets) { /* Not ragged: an input of batch 1 serves all. */
    if (q->shape[0] == a->batch) a->q_batch = a->queries * a->q_row;
    if (k->shape[0] == a->batch) a->k_batch = a->keys * a->k_row;
    if (v->shape[0] == a->batch) a->v_batch = a->keys * a->v_row;
    a->out_batch = a->queries * a->out_row;
  }
  a->lengths = op->lengths;
  a->query_offsets = op->query_offsets;
  a->key_offsets = op->key_offsets;
  a->scale = op->arg.attention.scale;
  a->causal = op->arg.attention.causal;
  a->window = op->arg.attention.window;
  a->left = op->arg.attention.left;
  a->right = op->arg.attention.right;
  li_attention_band(a);
  a->dropout = op->dropout;
  a->seed = op->ctx->state->seed;
  a->dropout_op = op->dropout_op;
  a->step = (uint32_t)op->ctx->state->step;
  if (op->own) { /* A recorded op has neither `own` nor dropout. */
    op->own->attention.bf16 = li_op_bf16(op);
    op->own->attention.dropout = li_op_dropout(op, li_times(a->batch * a->heads * a->queries, a->keys));
    a->own = &op->own->attention;
  }
  a->grad_out = op->out[0]->grad;
  a->grad_q = q->grad;
  a->grad_k = k->grad;
  a->grad_v = v->grad;
  if (op->arg.attention.scores) {
    a->log_sum_exp = op->out[1]->data;
    a->grad_log_sum_exp = op->out[1]->grad;
  } else if (op->out[1]) {
    a->sums = op->out[1]->data;
    a->grad_sums = op->out[1]->grad;
  }
}

LI_KERNEL_OP(attention, li_rows(op->out[0]) * op->arg.attention.heads)
#define LI_CPU_SOFTMAX_ATTENTION LI_CPU_OP(li_attention_query, li_attention_forward, li_attention_backward, 0)

/* Offsets of a ragged batch rise from 0 to the number of rows. */
LI_FN const int32_t *li_offsets(li_build *s, const int32_t *offsets, int64_t count, int64_t rows, const char *what) {
  const int32_t *kept = li_integers(s, offsets, count + 1, 0, rows, what);
  for (int64_t i = 0; i <= count && !s->failed; i++) {
    bool rises = offsets[0] == 0;
    if (i > 0) rises = offsets[i] >= offsets[i - 1];
    if (i == count) rises = rises && offsets[i] == rows;
    if (rises) continue;
    li_fail(s->op.ctx, LUNA_ERROR_OFFSETS, s->name, what, i, (int64_t)offsets[i], rows);
    s->failed = true;
  }
  return kept;
}

LI_FN int64_t li_ragged_longest(const int32_t *offsets, int64_t sequences) {
  int64_t longest = 0;
  for (int64_t b = 0; b < sequences; b++) longest = li_max(longest, (int64_t)offsets[b + 1] - offsets[b]);
  return longest;
}

/* Checks the inputs q, k and v, and puts their sizes into the op. */
LI_FN bool li_attention_fits(li_build *s, const luna_attention_config *c) {
  const luna_tensor *q = s->op.in[0], *k = s->op.in[1];
  const bool ragged = c->sequences > 0;
  const char *pattern = "q [b,n,D] k [c,m,D] v [e,m,E]";
  int64_t batch = 1;
  s->op.arg.attention.heads = c->heads;
  if (c->heads == 0) s->op.arg.attention.heads = 1;
  if (ragged) pattern = "q [n,D] k [m,D] v [m,E]";
  if (!li_fits(s, pattern) || !li_heads_fit(s, s->op.arg.attention.heads)) return false;
  for (int i = 0; i < 3 && !ragged; i++) { /* An input of batch 1 serves all. */
    const int64_t own = s->op.in[i]->shape[0];
    if (batch != 1 && own != 1 && own != batch)
      return li_refuse(s->op.ctx, LUNA_ERROR_BATCHES_DIFFER, s->name, batch, own);
    if (own != 1) batch = own;
  }
  s->op.arg.attention.batch = batch;
  s->op.arg.attention.queries = q->shape[1];
  s->op.arg.attention.keys = k->shape[1];
  if (ragged) {
    s->op.arg.attention.batch = c->sequences;
    s->op.arg.attention.queries = li_ragged_longest(c->query_offsets, c->sequences);
    s->op.arg.attention.keys = li_ragged_longest(c->key_offsets, c->sequences);
  }
  return true;
}

/* Puts the config into an op that has its sizes, and builds it. */
LI_FN luna_tensor *li_finish_attention(li_build *s, const luna_attention_config *c) {
  const luna_tensor *q = s->op.in[0], *k = s->op.in[1], *v = s->op.in[s->op.inputs - 1];
  const int64_t batch = s->op.arg.attention.batch, heads = s->op.arg.attention.heads, value_dim = li_last(v);
  const int64_t queries = s->op.arg.attention.queries, keys = s->op.arg.attention.keys;
  const bool ragged = c->sequences > 0;
  s->op.lengths = li_integers(s, c->lengths, batch, 0, keys, "lengths");
  if (ragged) {
    s->op.query_offsets = li_offsets(s, c->query_offsets, c->sequences, q->shape[0], "query_offsets");
    s->op.key_offsets = li_offsets(s, c->key_offsets, c->sequences, k->shape[0], "key_offsets");
  }
  if (s->failed) return li_abandon(s);
  if (c->log_sum_exp && (ragged || c->sums)) {
    li_fail(s->op.ctx, LUNA_ERROR_LOG_SUM_EXP, s->name, ragged ? "sequences" : "sums");
    return li_abandon(s);
  }
  if (li_on_device(s->op.ctx) && (c->window || c->log_sum_exp)) {
    li_fail(s->op.ctx, LUNA_ERROR_NO_OP, s->name, c->window ? "attention of a window" : "log-sum-exp as a result");
    return li_abandon(s);
  }
  s->op.arg.attention.scores = c->log_sum_exp != NULL;
  s->op.arg.attention.window = c->window;
  s->op.arg.attention.left = c->left;
  s->op.arg.attention.right = c->right;
  s->op.arg.attention.causal = c->causal;
  s->op.arg.attention.scale = c->scale;
  if (c->scale == 0) s->op.arg.attention.scale = (float)(1.0 / sqrt((double)(li_last(q) / heads)));
  s->op.dropout = c->dropout;
  const int64_t shape[3] = { batch, queries, value_dim }, rows[2] = { q->shape[0], value_dim };
  if (ragged) return li_finish_two(s, 2, rows, c->sums, heads);
  return li_finish_two(s, 3, shape, c->log_sum_exp ? c->log_sum_exp : c->sums, heads);
}

LUNA_API luna_tensor *luna_softmax_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                             const luna_attention_config *config) {
  luna_tensor *const in[] = { q, k, v };
  luna_attention_config c;
  li_build s;
  memset(&c, 0, sizeof c);
  if (config) c = *config;
  if (c.sums) *c.sums = NULL;
  if (c.log_sum_exp) *c.log_sum_exp = NULL;
  const bool ragged = c.sequences > 0;
  if (!li_start(&s, LUNA_OP_SOFTMAX_ATTENTION, __func__, in, 3, 3) || li_dropout_wrong(&s, c.dropout)) return NULL;
  if (!li_is_finite(c.scale))
    return li_fail(q->ctx, LUNA_ERROR_NOT_FINITE_ARGUMENT, s.name, "scale", (double)c.scale);
  if (li_checked(c.sequences, 1) < 0)
    return li_fail(q->ctx, LUNA_ERROR_VALUE_RANGE, s.name, "sequences", c.sequences, (int64_t)0, LI_MAX_COUNT);
  if (ragged && !c.query_offsets) return li_fail_null(q->ctx, s.name, "query_offsets");
  if (ragged && !c.key_offsets) return li_fail_null(q->ctx, s.name, "key_offsets");
  if (ragged && c.lengths) return li_fail(q->ctx, LUNA_ERROR_RAGGED_LENGTHS, c.sequences);
  if (!li_attention_fits(&s, &c)) return NULL;
  return li_finish_attention(&s, &c);
}

LI_FN luna_attention_config li_attention_config(int64_t heads, float dropout, const int32_t *lengths) {
  luna_attention_config a;
  memset(&a, 0, sizeof a);
  a.heads = heads;
  a.lengths = lengths;
  a.dropout = dropout;
  return a;
}

LUNA_API luna_tensor *luna_pack(luna_tensor *weights, luna_tensor *context, const luna_pack_config *config) {
  static const luna_pack_config defaults = { NULL, 0, NULL };
  const luna_pack_config *own = config ? config : &defaults;
  luna_attention_config c = li_attention_config(1, own->dropout, own->lengths);
  luna_tensor *const in[] = { weights, context };
  li_build s;
  if (own->sums) *own->sums = NULL;
  if (!li_start(&s, LUNA_OP_SOFTMAX_ATTENTION, __func__, in, 2, 2) || li_dropout_wrong(&s, c.dropout) ||
      !li_fits(&s, "weights [b,r,D] context [b,m,D]") || !li_heads_fit(&s, 1)) return NULL;
  c.scale = 1;
  c.sums = own->sums;
  s.op.arg.attention.heads = 1;
  s.op.arg.attention.batch = weights->shape[0];
  s.op.arg.attention.queries = weights->shape[1];
  s.op.arg.attention.keys = context->shape[1];
  return li_finish_attention(&s, &c);
}

/* --- Unpack [eq. 4]: x, residual [b,n,d], k, v [b,h,l,d], bias [b,h,l], out_bias [d] -> y [b,n,d]. It keeps the
   log-sum-exp [b,n,h]. --- */
LI_FN void li_unpack_args(const luna_op *op, li_unpack *u) {
  const luna_tensor *x = op->in[0], *k = op->in[1];
  memset(u, 0, sizeof *u);
  u->x = x->data; u->k = k->data; u->bias = op->in[2]->data; u->v = op->in[3]->data; u->out_bias = li_data(op, 4);
  u->residual = li_data(op, 5);
  u->out = op->out[0]->data;
  u->lse = (float *)op->kept;
  u->batch = x->shape[0]; u->rows = x->shape[1]; u->dim = x->shape[2]; u->heads = k->shape[1]; u->slots = k->shape[2];
  u->lengths = op->lengths;
  u->bf16 = li_op_bf16(op);
  u->dropout = li_op_dropout(op, li_times(u->batch * u->heads * u->rows, u->slots));
  u->last = li_op_last_dropout(op);
  u->grad_out = op->out[0]->grad;
  u->grad_x = x->grad; u->grad_k = k->grad; u->grad_bias = op->in[2]->grad; u->grad_v = op->in[3]->grad;
  u->grad_out_bias = li_grad(op, 4);
}

LI_KERNEL_OP(unpack, li_rows(op->in[0]) * op->in[1]->shape[1])
LI_FN luna_status li_unpack_residual_backward(luna_op *op) { /* dy [b,n,d] -> dx [b,n,d], dk, dv [b,h,l,d] */
  li_added_backward(op);
  return li_unpack_backward(op);
}
#define LI_CPU_UNPACK \
  LI_CPU_OP(li_unpack_query, li_unpack_forward, li_unpack_residual_backward, \
      LUNA_GRAD_IN_PLACE(5) | LUNA_ADDS_IN_PLACE(0))

/* Composes unpack from primitives, with all heads' slots side by side: k, v [b,h l,d], bias [b,h l]. */
LI_FN luna_tensor *li_unpack_composed(luna_tensor *const in[6], const int32_t *lengths, float dropout) {
  luna_tensor *x = in[0], *k = in[1];
  const int64_t batch = x->shape[0], n = x->shape[1], d = x->shape[2], h = k->shape[1], l = k->shape[2];
  luna_tensor *s = luna_matmul(x, li_reshape(k, 3, batch, h * l, d, 1), false, true);
  s = luna_add(li_permute(s, 1, 0, 2, 3), li_reshape(in[2], 2, batch, h * l, 1, 1));
  s = luna_softmax(li_reshape(li_permute(s, 1, 0, 2, 3), 4, batch, n, h, l), lengths);
  /* The fused op's order */
  if (dropout > 0) s = li_permute(luna_dropout(li_permute(s, 0, 2, 1, 3), dropout), 0, 2, 1, 3);
  k = li_reshape(in[3], 3, batch, h * l, d, 1);
  s = luna_matmul(li_reshape(s, 3, batch, n, h * l, 1), k, false, false);
  if (in[4]) s = luna_add(s, in[4]);
  return s;
}

LI_FN luna_tensor *li_unpack_with(luna_tensor *const in[6], const int32_t *lengths, float dropout, float last_dropout) {
  luna_tensor *x = in[0], *k = in[1];
  li_build s;
  if (!li_start(&s, LUNA_OP_UNPACK, "luna_unpack", in, 4, 6) || li_dropout_wrong(&s, dropout) ||
      !li_fits(&s, "x [b,n,D] k [b,H,L,D] bias [b,H,L] v [b,H,L,D] out_bias? [D] residual? [b,n,D]") ||
      !li_product_fits(&s, k->shape[1] * k->shape[2], x->shape[2], LI_MAX_SCRATCH) ||
      !li_product_fits(&s, li_rows(x), k->shape[1], LI_MAX_COUNT)) return NULL;
  if (!li_has_op(x, LUNA_OP_UNPACK)) {
    x = luna_dropout(li_unpack_composed(in, lengths, dropout), last_dropout);
    if (in[5]) x = luna_add(in[5], x);
    return x;
  }
  s.op.last_dropout = last_dropout;
  s.op.lengths = li_integers(&s, lengths, x->shape[0], 0, INT32_MAX, "lengths");
  s.op.dropout = dropout;
  return li_finish_like(&s, x);
}

LUNA_API luna_tensor *luna_unpack(luna_tensor *x, luna_tensor *k, luna_tensor *bias, luna_tensor *v,
                                  const luna_unpack_config *config) {
  static const luna_unpack_config defaults = { NULL, NULL, 0 };
  const luna_unpack_config *c = config ? config : &defaults;
  luna_tensor *const in[6] = { x, k, bias, v, c->out_bias, NULL };
  return li_unpack_with(in, c->lengths, c->dropout, 0);
}

/* ---- Causal ops ---- */
/* --- Causal product [eq. 7]: x [b,n,d], y [b,n,d], z [b,n,e] -> out [b,n,e] --- */
LI_FN void li_causal_args(const luna_op *op, li_causal *c) {
  const luna_tensor *x = op->in[0], *z = op->in[2];
  memset(c, 0, sizeof *c);
  c->x = x->data; c->y = op->in[1]->data; c->z = z->data; c->out = op->out[0]->data;
  c->batch = x->shape[0]; c->rows = x->shape[1]; c->heads = op->arg.causal.heads;
  c->xy_row = li_last(x); c->z_row = li_last(z);
  c->dim = c->xy_head = c->xy_row / c->heads;
  c->value_dim = c->z_head = c->z_row / c->heads;
  c->xy_batch = c->rows * c->xy_row;
  c->z_batch = c->rows * c->z_row;
  c->grad_out = op->out[0]->grad;
  c->grad_x = x->grad; c->grad_y = op->in[1]->grad; c->grad_z = z->grad;
  c->horizon = op->arg.causal.horizon;
}

LI_KERNEL_OP(causal, 0)
#define LI_CPU_CAUSAL_PRODUCT LI_CPU_OP(li_causal_query, li_causal_forward, li_causal_backward, 0)

LI_FN luna_tensor *li_causal_product(luna_tensor *x, luna_tensor *y, luna_tensor *z, int64_t heads, int64_t horizon) {
  luna_tensor *const in[] = { x, y, z };
  li_build s;
  if (!li_start(&s, LUNA_OP_CAUSAL_PRODUCT, "luna_causal_product", in, 3, 3) ||
      !li_fits(&s, "x [b,n,D] y [b,n,D] z [b,n,E]") || !li_heads_fit(&s, heads) ||
      !li_product_fits(&s, x->shape[2] / heads, z->shape[2] / heads, LI_MAX_SCRATCH)) return NULL;
  s.op.arg.causal.heads = heads;
  s.op.arg.causal.horizon = horizon;
  return li_finish_like(&s, z);
}
LUNA_API luna_tensor *luna_causal_product(luna_tensor *x, luna_tensor *y, luna_tensor *z, int64_t heads) {
  return li_causal_product(x, y, z, heads, 0);
}

/* --- Causal Luna [section 3.3]: q, k, v [b,n,d], s, gates? [b,n,l] -> y [b,n,d]. The forgetting form has gates.
   Forward keeps W, or U and sums of weights. A stream has a state and a position. --- */
LI_FN void li_causal_luna_args(const luna_op *op, li_causal_luna *c) {
  const luna_tensor *q = op->in[0];
  const bool forgets = op->kind == LUNA_OP_FORGETTING_LUNA;
  li_clear(c, sizeof *c);
  c->q = q->data; c->k = op->in[1]->data; c->v = op->in[2]->data; c->s = op->in[3]->data;
  c->out = op->out[0]->data;
  c->kept = (float *)op->kept;
  c->batch = q->shape[0]; c->rows = q->shape[1]; c->heads = op->arg.causal.heads;
  c->head_dim = li_last(q) / c->heads;
  c->slots = li_last(op->in[3]) / c->heads;
  c->lengths = op->lengths;
  c->scale = op->arg.causal.scale;
  c->omega = op->activation;
  if (op->position) c->position = *op->position;
  c->horizon = op->arg.causal.horizon;
  c->state = op->state;
  if (forgets) c->forget = op->in[4]->data ? op->in[4]->data : li_nothing; /* Null while measuring */
  c->routed = forgets && op->in[4]->rank == 1;
  if (op->own) { /* A stream's recorded op has no `own`: no dropout, no carried state. */
    li_attention_own *own = &op->own->attention;
    memset(own, 0, sizeof *own);
    if (op->dropout > 0) own->dropout = li_op_dropout(op, luna_count(op->in[3]));
    own->positions = op->before ? op->position : NULL;
    own->before = op->before;
    c->own = own;
  }
  if (LI_TRAINS) {
    c->grad_out = op->out[0]->grad;
    c->grad_q = q->grad; c->grad_k = op->in[1]->grad; c->grad_v = op->in[2]->grad; c->grad_s = op->in[3]->grad;
    if (forgets) c->grad_forget = op->in[4]->grad;
  }
}

LI_KERNEL_OP(causal_luna, (op->inputs > 4 ? 2 : 1) * luna_count(op->in[3]))
#define LI_CPU_CAUSAL_LUNA LI_CPU_OP(li_causal_luna_query, li_causal_luna_forward, li_causal_luna_backward, 0)
#define LI_CPU_FORGETTING_LUNA LI_CPU_CAUSAL_LUNA

/* --- Route: router [b,n,h l], strength [b,n,h] -> w [b,n,h l]. A token writes to two slots of a head, those of the
   largest logits z: w = 1 - e^(-r s), with s = sigmoid(strength) and shares r in the ratio of sigmoid(z), whose sum is
   1. Other slots get 0. dw/ds = r (1 - w), and dr_0/dz_0 = r_0 r_1 sigmoid(-z_0). --- */
typedef struct li_routing { int64_t slot[2]; float share[2], strength; } li_routing; /* The slots, r, s */
LI_HOT bool li_is_above(float a, float b) { return a > b || (a != a && b == b); } /* Or NaN */
LI_HOT li_routing li_routing_of(const float *router, int64_t slots, float strength) {
  li_routing w = { { 0, 1 }, { 0, 0 }, 0 };
  if (li_is_above(router[1], router[0])) {
    w.slot[0] = 1;
    w.slot[1] = 0;
  }
  for (int64_t i = 2; i < slots; i++) {
    if (li_is_above(router[i], router[w.slot[0]])) {
      w.slot[1] = w.slot[0];
      w.slot[0] = i;
    } else if (li_is_above(router[i], router[w.slot[1]])) w.slot[1] = i;
  }

  /* Smaller sigmoid over larger */
  const float ratio = li_exp1_scalar(li_activation_scalar(LUNA_ACTIVATION_SOFTPLUS, -router[w.slot[0]]) -
                                     li_activation_scalar(LUNA_ACTIVATION_SOFTPLUS, -router[w.slot[1]]));
  w.share[0] = 1 / (1 + ratio);
  w.share[1] = ratio / (1 + ratio);

  if (strength < -15) strength = -15;
  if (strength > 15) strength = 15;
  w.strength = li_activation_scalar(LUNA_ACTIVATION_SIGMOID, strength);
  return w;
}
/* Adds the gradients of a head's row, from y and its gradient. */
LI_HOT void li_route_row_back(const li_routing *w, const float *router, const float *y, const float *dy, float logit,
                              float *drouter, float *dstrength) {
  float change[2];
  for (int i = 0; i < 2; i++) change[i] = dy[w->slot[i]] * (1 - y[w->slot[i]]);
  const float along = w->share[0] * change[0] + w->share[1] * change[1];
  const float across = w->share[0] * w->share[1] * w->strength * (change[0] - change[1]);
  if (dstrength && logit >= -15 && logit <= 15) *dstrength += along * w->strength * (1 - w->strength);

  for (int i = 0; i < 2 && drouter; i++) {
    const float slope = li_activation_scalar(LUNA_ACTIVATION_SIGMOID, -router[w->slot[i]]);
    drouter[w->slot[i]] += (i == 0 ? across : -across) * slope;
  }
}
LI_FN void li_route_part(luna_op *op, bool back, int64_t first, int64_t last) {
  const luna_tensor *router = op->in[0], *strength = op->in[1], *out = op->out[0];
  const int64_t heads = li_last(strength), slots = li_last(router) / heads;

  for (int64_t i = first * heads; i < last * heads; i++) {
    const int64_t at = i * slots;
    const li_routing w = li_routing_of(router->data + at, slots, strength->data[i]);
    if (back) {
      li_route_row_back(&w, router->data + at, out->data + at, out->grad + at, strength->data[i],
                        li_offset(router->grad, at), li_offset(strength->grad, i));
      continue;
    }

    memset(out->data + at, 0, li_bytes(slots));
    for (int j = 0; j < 2; j++) {
      const float y = li_activation_scalar(LUNA_ACTIVATION_TANH, w.strength * w.share[j] / 2);
      out->data[at + w.slot[j]] = 2 * y / (1 + y); /* 1 - e^{-strength share} */
    }
  }
}
LI_PART_OP(route, li_rows(op->in[0]), li_last(op->in[0]))
#define LI_CPU_ROUTE LI_CPU_OP(li_query_none, li_route_forward, li_route_backward, 0)

LUNA_API luna_tensor *luna_route(luna_tensor *router, luna_tensor *strength) {
  luna_tensor *const in[] = { router, strength };
  li_build s;
  if (!li_start(&s, LUNA_OP_ROUTE, __func__, in, 2, 2) || !li_fits(&s, "router [b,n,L] strength [b,n,H]"))
    return NULL;
  const int64_t values = li_last(router), heads = li_last(strength);
  if (!li_is_checked(router->ctx) && (values % heads != 0 || values / heads < 2))
    return li_fail(router->ctx, LUNA_ERROR_ROUTE_SLOTS, s.name, values, heads);
  return li_finish_like(&s, router);
}

/* Composes causal Luna from q, k, v and s: for dropout, which its op lacks, or without the op. */
LI_FN luna_tensor *li_causal_composed(luna_tensor *const in[4], const luna_causal_nested_config *c, float scale) {
  const int64_t batch = in[3]->shape[0], n = in[3]->shape[1], slots = in[3]->shape[2], h = c->heads;
  luna_tensor *a = luna_activate(in[3], c->omega);
  luna_tensor *w = li_causal_product(luna_scale(in[0], scale), in[1], a, h, c->horizon);
  w = luna_dropout(luna_softmax(li_reshape(w, 4, batch, n, h, slots / h), c->lengths), c->dropout);
  return li_causal_product(li_reshape(w, 3, batch, n, slots, 1), a, in[2], h, c->horizon);
}

/* Builds causal Luna or, if the config has gates, its forgetting form. `past` has what a stream's or a carried state's
   earlier rows left; else it is null. */
LI_FN luna_tensor *li_causal_nested(luna_tensor *const qkvs[4], const luna_causal_nested_config *c,
                                    const li_past *past) {
  luna_tensor *q = qkvs[0], *s = qkvs[3], *const in[5] = { q, qkvs[1], qkvs[2], s, c->forget };
  const char *pattern = "q [b,n,D] k [b,n,D] v [b,n,D] s [b,n,L] forget [b,n,L]";
  luna_op_kind kind = LUNA_OP_FORGETTING_LUNA;
  const int64_t heads = c->heads;
  int count = 5;
  li_build build;
  if (!c->forget) {
    pattern = "q [b,n,D] k [b,n,D] v [b,n,D] s [b,n,L]";
    kind = LUNA_OP_CAUSAL_LUNA;
    count = 4;
  } else if (c->routed) pattern = "q [b,n,D] k [b,n,D] v [b,n,D] s [b,n,L] forget [H]";
  if (!li_start(&build, kind, "luna_causal_nested_attention", in, count, count) ||
      li_dropout_wrong(&build, c->dropout) || !li_fits(&build, pattern)) return NULL;
  if (c->routed && (!c->forget || li_last(c->forget) != heads))
    return li_fail(q->ctx, LUNA_ERROR_ROUTED, build.name, heads);
  if (!li_heads_fit(&build, heads) ||
      !li_product_fits(&build, q->shape[2] / heads, s->shape[2] / heads, LI_MAX_SCRATCH)) return NULL;
  if (!li_is_omega((int)c->omega) && !li_is_checked(q->ctx))
    return li_fail(q->ctx, LUNA_ERROR_OMEGA, build.name, (int64_t)c->omega);
  if (c->horizon < LUNA_HORIZON_NONE && !li_is_checked(q->ctx) &&
      !li_in(q->ctx, build.name, "horizon", c->horizon, LUNA_HORIZON_NONE, INT32_MAX)) return NULL;
  const float scale = (float)(1.0 / sqrt((double)(q->shape[2] / heads)));
  if (!c->forget && !q->ctx->bump && (!li_has_op(q, LUNA_OP_CAUSAL_LUNA) || (c->dropout > 0 && q->ctx->training)))
    return li_causal_composed(in, c, scale);
  build.op.lengths = li_integers(&build, c->lengths, q->shape[0], 0, INT32_MAX, "lengths");
  build.op.arg.causal.heads = heads;
  if (!c->forget) build.op.arg.causal.horizon = li_max(c->horizon, 0);
  build.op.arg.causal.scale = scale;
  build.op.activation = c->omega;
  if (c->forget) build.op.dropout = c->dropout;
  if (past) {
    build.op.state = past->state;
    build.op.before = past->before;
    build.op.position = past->position;
  }
  return li_finish_like(&build, q);
}

LUNA_API luna_tensor *luna_causal_nested_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_tensor *s,
                                                   const luna_causal_nested_config *config) {
  luna_causal_nested_config c;
  luna_tensor *const in[4] = { q, k, v, s };
  memset(&c, 0, sizeof c);
  if (config) c = *config;
  if (c.heads == 0) c.heads = 1;
  if (c.omega == LUNA_ACTIVATION_DEFAULT) c.omega = LUNA_ACTIVATION_SOFTPLUS2;
  return li_causal_nested(in, &c, NULL);
}

/* --- Short convolution: x [b,n,d], weight [d,w], bias [d] -> y [b,n,d]. A stream has a history [b,w - 1,d]. --- */
LI_FN li_convolution li_convolution_of(const luna_op *op, int64_t b) {
  const int64_t n = li_last(op->in[0]), rows = op->in[0]->shape[1], width = li_last(op->in[1]);
  li_convolution a;
  a.rows = rows;
  a.n = n;
  a.width = width;
  a.x = li_offset(op->in[0]->data, b * rows * n);
  a.history = li_offset(op->history, b * (width - 1) * n);
  a.weight = op->in[1]->data;
  a.bias = li_data(op, 2);
  a.y = li_offset(op->out[0]->data, b * rows * n);
  a.dy = li_offset(op->out[0]->grad, b * rows * n);
  a.dx = li_offset(op->in[0]->grad, b * rows * n);
  a.dweight = li_grad(op, 1);
  a.dbias = li_grad(op, 2);
  return a;
}

LI_HOT void li_convolution_rows_part(luna_op *op, bool back, int64_t first, int64_t last) {
  for (; first < last; first++) {
    const li_convolution a = li_convolution_of(op, first);
    if (back) li_k(op)->short_convolution_backward(&a);
    else li_k(op)->short_convolution(&a);
    if (a.history) li_history_move(op->history + first * (a.width - 1) * a.n, a.width - 1, a.x, a.rows, a.n);
  }
}
LI_PART_OP(convolution_rows, op->in[0]->shape[0], op->in[0]->shape[1] * li_last(op->in[0]))
LI_FN void li_convolution_columns(luna_op *op, int64_t first, int64_t last) {
  for (int64_t b = 0; b < op->in[0]->shape[0]; b++) {
    const li_convolution a = li_convolution_of(op, b);
    li_k(op)->short_convolution_weights(&a, first, last);
  }
}
LI_FN luna_status li_convolution_backward(luna_op *op) { /* dy [b,n,d] -> dx [b,n,d], dweight [d,w], dbias [d] */
  const luna_tensor *x = op->in[0];
  if (x->grad) li_convolution_rows_backward(op);
  if (li_grad(op, 1) || li_grad(op, 2))
    li_split(op, li_last(x), x->shape[0] * x->shape[1], li_convolution_columns);
  return LUNA_OK;
}
#define LI_CPU_SHORT_CONVOLUTION LI_CPU_OP(li_query_none, li_convolution_rows_forward, li_convolution_backward, 0)

LI_FN luna_tensor *li_short_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias, const li_past *past) {
  luna_tensor *const in[] = { x, weight, bias };
  li_build s;
  if (!li_start(&s, LUNA_OP_SHORT_CONVOLUTION, "luna_short_convolution", in, 2, 3) ||
      !li_fits(&s, "x [b,n,d] weight [d,W] bias? [d]")) return NULL;
  if (past) s.op.history = past->history;
  return li_finish_like(&s, x);
}
LUNA_API luna_tensor *luna_short_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias) {
  return li_short_convolution(x, weight, bias, NULL);
}

/* Does the same after the rows of a carried state, and writes the rows of the new state. */
LI_FN luna_tensor *li_carried_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias, const li_past *past) {
  const int64_t batch = x->shape[0], n = x->shape[1], d = x->shape[2], rows = weight->shape[1] - 1;
  const int64_t shape[3] = { batch, rows, d };
  /* `before` counts doubles. */
  const float *before = (const float *)(const void *)((const char *)past->history + past->before * 8);
  if (rows == 0) return li_short_convolution(x, weight, bias, NULL);
  luna_tensor *const with[] = { luna_tensor_new(x->ctx, before, 3, shape), x }, *all = luna_concat(with, 2, 1);
  if (all && li_computes(x->ctx)) {
    for (int64_t b = 0; b < batch; b++)
      memcpy(past->history + b * rows * d, all->data + (b * (rows + n) + n) * d, li_bytes(rows * d));
  }
  return luna_slice(li_short_convolution(all, weight, bias, NULL), 1, rows, n);
}

/* ---- Losses ---- */
/* --- Cross-entropy: logits [...,v], labels [...] (-1: ignored) -> loss [1]. It keeps each row's log-sum-exp. --- */
LI_HOT li_cross_entropy li_cross_entropy_of(const luna_op *op, int64_t rows, int64_t classes, const float *logits) {
  li_cross_entropy a;
  memset(&a, 0, sizeof a);
  a.logits = logits;
  a.labels = op->index;
  a.rows = rows;
  a.classes = a.columns = a.logits_row = a.grad_row = classes;
  a.smoothing = op->arg.cross_entropy.smoothing;
  a.lse = (float *)op->kept;
  return a;
}
LI_FN float li_cross_entropy_factor(const luna_op *op) {
  return op->arg.cross_entropy.factor * op->out[0]->grad[0];
}
LI_HOT li_cross_entropy li_cross_entropy_args(const luna_op *op) {
  return li_cross_entropy_of(op, li_rows(op->in[0]), li_last(op->in[0]), op->in[0]->data);
}
LI_FN void li_cross_entropy_query(luna_op *op) {
  const size_t rows = li_bytes(li_rows(op->in[0]));
  if (op->training) op->kept_size = rows;
  op->workspace_size = rows;
}
LI_HOT void li_cross_entropy_body(luna_op *op, int64_t first, int64_t last) {
  li_cross_entropy a = li_cross_entropy_args(op);
  a.loss = (float *)op->workspace;
  a = li_cross_entropy_rows(&a, first, last);
  li_k(op)->cross_entropy(&a);
}
LI_HOT void li_cross_entropy_back(luna_op *op, int64_t first, int64_t last) {
  li_cross_entropy a = li_cross_entropy_args(op);
  a.grad = op->in[0]->grad;
  a.factor = li_cross_entropy_factor(op);
  a.add = !(op->sets & 1);
  a = li_cross_entropy_rows(&a, first, last);
  li_k(op)->cross_entropy_backward(&a);
}
LI_FN luna_status li_cross_entropy_forward(luna_op *op) {
  const int64_t rows = li_rows(op->in[0]);
  li_split(op, rows, li_last(op->in[0]), li_cross_entropy_body);
  op->out[0]->data[0] = (float)(li_k(op)->sum(rows, (const float *)op->workspace) *
                                (double)op->arg.cross_entropy.factor);
  return LUNA_OK;
}
LI_FN luna_status li_cross_entropy_backward(luna_op *op) { /* dloss [1] -> dlogits [...,v] */
  return li_split(op, li_rows(op->in[0]), li_last(op->in[0]), li_cross_entropy_back);
}
#define LI_CPU_CROSS_ENTROPY \
  LI_CPU_OP(li_cross_entropy_query, li_cross_entropy_forward, li_cross_entropy_backward, LUNA_SETS_GRAD(0))

LI_FN luna_tensor *li_counts(luna_tensor *loss, int64_t counted) {
  if (loss) loss->own->counted = 1 + counted;
  return loss;
}
LUNA_API int64_t luna_counted(const luna_tensor *loss) { return loss ? loss->own->counted - 1 : -1; }
/* A loss of 0 looks perfect even if every label is ignored. Other parts of a batch may have labels that count. */
LI_FN void li_log_ignored(const luna_ctx *ctx, const char *name, const char *what, int64_t count) {
  if (li_computes(ctx) && !ctx->shares) li_note(ctx, "%s: the loss is 0, as none of %d %s counts", name, count, what);
}

/* Puts labels and the config into an op. */
LI_FN bool li_labels(li_build *s, int64_t rows, int64_t classes, const int32_t *labels,
                     const luna_cross_entropy_config *config) {
  luna_ctx *ctx = s->op.ctx;
  luna_cross_entropy_config c;
  int64_t counted = 0;
  memset(&c, 0, sizeof c);
  if (config) c = *config;
  if (!labels && rows > 0) return li_refused(li_fail_null(ctx, s->name, "labels"));
  if (!(c.smoothing >= 0 && c.smoothing <= 1))
    return li_refuse(ctx, LUNA_ERROR_SMOOTHING, s->name, (double)c.smoothing);
  int32_t *kept = (int32_t *)li_step_host(ctx, s->name, (size_t)rows * sizeof *kept);
  if (!kept) return false;
  for (int64_t i = 0; i < rows; i++) {
    const bool ignored = labels[i] < 0 || (c.ignore && labels[i] == c.ignore_index);
    kept[i] = labels[i];
    if (ignored) kept[i] = -1;
    if (kept[i] >= classes)
      return li_refuse(ctx, LUNA_ERROR_LABEL_RANGE, s->name, i, (int64_t)kept[i], classes);
    counted += !ignored;
  }
  s->counted = counted;
  s->op.arg.cross_entropy.factor = 1;
  if (c.sum) s->counted = -1;
  else if (counted > 0) s->op.arg.cross_entropy.factor /= (float)counted;
  if (counted == 0) li_log_ignored(ctx, s->name, "labels", rows);
  s->op.index = li_on_device(ctx) ? li_integers_copy(s, kept, rows) : kept;
  s->op.arg.cross_entropy.smoothing = c.smoothing;
  return s->op.index != NULL;
}

LI_FN luna_tensor *li_cross_entropy_loss(const char *name, luna_tensor *logits, const int32_t *labels,
                                          const luna_cross_entropy_config *config) {
  const int64_t one = 1;
  li_build s;
  if (!li_start(&s, LUNA_OP_CROSS_ENTROPY, name, &logits, 1, 1) || !li_fits(&s, "logits [...,v]")) return NULL;
  if (!li_labels(&s, li_rows(logits), li_last(logits), labels, config)) return li_abandon(&s);
  return li_counts(li_finish(&s, 1, &one), s.counted);
}

LUNA_API luna_tensor *luna_cross_entropy(luna_tensor *logits, const int32_t *labels,
                                         const luna_cross_entropy_config *config) {
  return li_cross_entropy_loss(__func__, logits, labels, config);
}

/* --- Linear cross-entropy: x [...,i], W [o,i], b [o], labels [...] -> loss [1]. The logits x W^T + b are made in
   panels of columns, with running sums, and again in backward. It keeps what cross-entropy keeps. --- */
/* A panel's columns are a multiple of LI_KC, because dx is a sum over them. */
#define LI_LOGIT_COLUMNS 1024
typedef struct li_logits {
  luna_op *op;
  li_cross_entropy part;
  float *panel;  /* [rows, part.columns]: logits, then dlogits */
  float *panels; /* x, for dW */
  void *scratch;
} li_logits;
LI_FN li_matrix li_logits_matrix(const li_logits *w) {
  return li_strided(w->panel, w->part.rows, w->part.columns, w->part.grad_row);
}
LI_FN void li_logits_product(const li_logits *w, int which, li_gemm *g) {
  li_linear_columns(w->op, which, li_logits_matrix(w), w->part.first, g);
  if (which == 2) g->b_panels = w->panels;
}
LI_FN void li_logits_multiply(const li_logits *w, int which) {
  li_gemm g;
  li_logits_product(w, which, &g);
  li_multiply(w->op, &g, w->scratch);
}
/* Moves to the panel that starts at column `first`; returns false after the last panel. */
LI_FN bool li_logits_next(li_logits *w, int64_t first) {
  w->part.first = first;
  w->part.columns = li_min(LI_LOGIT_COLUMNS, w->part.classes - first);
  return w->part.columns > 0;
}

/* Sets the sizes and the layout in the workspace. Returns its bytes without the products' scratch. */
LI_FN size_t li_logits_start(li_logits *w, luna_op *op, bool backward, void *workspace) {
  char *at = workspace ? (char *)workspace : (char *)w, *const start = at; /* Null: only offsets count */
  const int64_t rows = li_rows(op->in[0]);
  li_gemm g;
  memset(w, 0, sizeof *w);
  w->op = op;
  w->part = li_cross_entropy_of(op, rows, op->in[1]->shape[0], NULL);
  /* With a power of two, rows would share cache sets. */
  w->part.grad_row = w->part.logits_row = LI_LOGIT_COLUMNS + 16;
  li_logits_next(w, 0);
  w->panel = li_take(&at, rows * w->part.grad_row);
  w->part.logits = w->part.grad = w->panel;
  if (backward) {
    w->panels = (float *)(void *)at;
    li_logits_product(w, 2, &g);
    at += li_panels_bytes(li_k(op), &g);
    if (workspace && g.c) li_run_make_panels(li_k(op), &g, &op->ctx->parallel, w->panels);
  } else {
    w->part.sums = (li_row_sums *)(void *)at;
    at += li_round((size_t)rows * sizeof *w->part.sums);
    w->part.loss = li_take(&at, rows);
  }
  w->scratch = at;
  return (size_t)(at - start);
}

LI_FN size_t li_logits_workspace(luna_op *op, bool backward) {
  li_logits w;
  size_t bytes = li_logits_start(&w, op, backward, NULL), gemm = 0;
  for (int which = 0; which < (backward ? 3 : 1); which++) {
    li_gemm g;
    li_logits_product(&w, which, &g);
    gemm = li_larger(gemm, li_gemm_scratch(li_k(op), &g, op->ctx->parallel.threads));
  }
  return bytes + gemm;
}

/* Adds a panel to the rows' sums or, in backward, computes its gradient. */
LI_FN void li_logits_panel(void *work, int64_t thread, int64_t first, int64_t last) {
  const li_logits *w = (const li_logits *)work;
  const li_cross_entropy a = li_cross_entropy_rows(&w->part, first, last);
  (void)thread;
  if (a.sums) li_k(w->op)->cross_entropy(&a);
  else li_k(w->op)->cross_entropy_backward(&a);
}
LI_FN void li_linear_cross_entropy_query(luna_op *op) {
  if (op->training) op->kept_size = li_bytes(li_rows(op->in[0]));
  op->workspace_size = li_logits_workspace(op, false);
  op->backward_workspace_size = li_logits_workspace(op, true);
}
LI_FN luna_status li_linear_cross_entropy_forward(luna_op *op) {
  li_logits w;
  li_logits_start(&w, op, false, op->workspace);
  for (int64_t first = 0; li_logits_next(&w, first); first += LI_LOGIT_COLUMNS) {
    li_logits_multiply(&w, 0);
    li_each(&op->ctx->parallel, w.part.rows, li_logits_panel, &w);
  }
  op->out[0]->data[0] = (float)(li_k(op)->sum(w.part.rows, w.part.loss) * (double)op->arg.cross_entropy.factor);
  return LUNA_OK;
}

LI_FN luna_status li_linear_cross_entropy_backward(luna_op *op) { /* dloss [1] -> dx [...,i], dW [o,i], db [o] */
  const li_parallel *parallel = &op->ctx->parallel;
  li_logits w;
  li_logits_start(&w, op, true, op->workspace);
  w.part.factor = li_cross_entropy_factor(op);
  for (int64_t first = 0; li_logits_next(&w, first); first += LI_LOGIT_COLUMNS) {
    li_logits_multiply(&w, 0);
    li_each(parallel, w.part.rows, li_logits_panel, &w);
    li_logits_multiply(&w, 1);
    li_logits_multiply(&w, 2);
    li_sum_columns(op, li_logits_matrix(&w), li_offset(li_grad(op, 2), first));
  }
  return LUNA_OK;
}
#define LI_CPU_LINEAR_CROSS_ENTROPY \
  LI_CPU_OP(li_linear_cross_entropy_query, li_linear_cross_entropy_forward, \
      li_linear_cross_entropy_backward, LUNA_SETS_GRAD(0))

LI_FN luna_tensor *li_linear_cross_entropy_loss(const char *name, luna_tensor *x, luna_tensor *weight,
                                                 luna_tensor *bias, const int32_t *labels,
                                                 const luna_cross_entropy_config *config) {
  const int64_t one = 1;
  luna_tensor *const in[] = { x, weight, bias };
  li_build s;
  if (!li_start(&s, LUNA_OP_LINEAR_CROSS_ENTROPY, name, in, 2, 3) ||
      !li_fits(&s, "x [...,i] weight [o,i] bias? [o]")) return NULL;
  /* This composes it if one panel would hold all logits, or if the backend lacks the op. */
  if (weight->shape[0] <= LI_LOGIT_COLUMNS || !li_has_op(x, LUNA_OP_LINEAR_CROSS_ENTROPY))
    return li_cross_entropy_loss(name, luna_linear(x, weight, bias), labels, config);
  if (!li_product_fits(&s, li_rows(x), weight->shape[0], LI_MAX_COUNT)) return li_abandon(&s);
  if (!li_int8_ready(&s, 1)) return NULL;
  if (!li_labels(&s, li_rows(x), weight->shape[0], labels, config)) return li_abandon(&s);
  return li_counts(li_finish(&s, 1, &one), s.counted);
}

LUNA_API luna_tensor *luna_linear_cross_entropy(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                                const int32_t *labels, const luna_cross_entropy_config *config) {
  return li_linear_cross_entropy_loss(__func__, x, weight, bias, labels, config);
}

/* --- MSE: values [...], targets [...] -> loss [1]. A target of NaN does not count. --- */
LUNA_API luna_tensor *luna_set_counted(luna_tensor *loss, const char *name, int64_t counted, int64_t targets) {
  if (loss && counted == 0) li_log_ignored(loss->ctx, name, "targets", targets);
  return li_counts(loss, counted);
}
LUNA_API luna_tensor *luna_mse(luna_tensor *values, const float *targets) {
  const int64_t count = luna_count(values), one = 1;
  int64_t counted = 0;
  li_build s;
  if (!li_start(&s, LUNA_OP_COUNT, __func__, &values, 1, 1)) return NULL;
  if (!targets && count > 0) return li_fail_null(values->ctx, __func__, "targets");
  const luna_scope scope = luna_scope_begin(values->ctx);
  for (int64_t i = 0; i < count; i++) counted += targets[i] == targets[i];

  luna_tensor *t = luna_tensor_new(values->ctx, targets, values->rank, values->shape);
  luna_tensor *nothing = luna_tensor_new(values->ctx, NULL, 1, &one);
  luna_tensor *e = luna_where(luna_equal(t, t), luna_sub(values, t), nothing);
  luna_tensor *mean = luna_scale(luna_sum_all(luna_mul(e, e)), (float)(1.0 / (double)li_max(counted, 1)));
  return li_result(scope, luna_set_counted(mean, __func__, counted, count));
}

/* ---- Custom ops ---- */
LI_FN void li_custom_query(luna_op *op) {
  op->workspace_size = op->backward_workspace_size = op->arg.custom.workspace_size;
}
LI_FN luna_status li_custom_run(luna_op *op, bool back) {
  const luna_custom *custom = &op->arg.custom;
  void *state = (void *)(uintptr_t)custom->state;
  op->ctx->custom = op;
  luna_status status;
  if (back) status = custom->backward(op->in, op->inputs, op->out[0], state);
  else status = custom->forward((const luna_tensor *const *)op->in, op->inputs, op->out[0], state);
  op->ctx->custom = NULL;
  return status;
}

LI_RUN_OP(custom)
#define LI_CPU_CUSTOM LI_CPU_OP(li_custom_query, li_custom_forward, li_custom_backward, 0)

LUNA_API luna_tensor *luna_custom_op(luna_tensor *const *in, int count, int rank, const int64_t *shape,
                                     const luna_custom *custom) {
  void *memory;
  li_build s;
  if (!li_all(in, count, __func__) || !li_start(&s, LUNA_OP_CUSTOM, __func__, in, 1, count))
    return NULL;
  const char *null = NULL;
  if (!custom) null = "custom";
  else if (!custom->forward) null = "custom->forward";
  else if (!custom->backward) null = "custom->backward";
  else if (custom->state_size && !custom->state) null = "custom->state";
  if (null) return li_fail_null(in[0]->ctx, __func__, null);
  if (li_dropout_wrong(&s, custom->dropout)) return NULL;
  if (!li_step(in[0]->ctx, custom->state_size, false, &memory))
    return li_op_no_memory(&s, custom->state_size);
  if (custom->state_size) memcpy(memory, custom->state, custom->state_size);
  s.op.arg.custom = *custom;
  s.op.arg.custom.state = memory;
  s.op.dropout = custom->dropout;
  return li_finish(&s, rank, shape);
}

/* Returns the op whose functions run now, or null. */
LI_FN const luna_op *li_custom_of(const luna_tensor *out) { return out ? out->ctx->custom : NULL; }
LUNA_API void luna_custom_dropout(const luna_tensor *out, int64_t first, int64_t count, float *factors) {
  const luna_op *op = li_custom_of(out);
  if (!op) return;
  const li_dropout d = li_op_dropout(op, op->arg.custom.dropped);
  if (li_k(op)->panels) li_k(op)->dropout_mask(&d, first, count, factors);
  else
    for (int64_t i = 0; i < count; i++) factors[i] = li_dropout_at(&d, first + i);
}

LUNA_API luna_run luna_custom_run(const luna_tensor *out) {
  const luna_op *op = li_custom_of(out);
  luna_run run;
  memset(&run, 0, sizeof run);
  if (!op) return run;
  run.isa = op->ctx->options.isa;
  run.scratch = op->workspace;
  run.scratch_size = op->workspace_size;
  run.parallel_for = op->ctx->parallel.run;
  run.parallel_user = op->ctx->parallel.user;
  run.threads = (int)op->ctx->parallel.threads;
  return run;
}

/* --- The CPU's table: an op without a LI_CPU_<NAME> does not compile --- */
static const luna_backend li_cpu = {
  1, sizeof(luna_backend), 0, 0, 0,
  NULL, NULL, NULL, NULL, /* No open, no allocate */
  li_cpu_copy, li_cpu_zero, NULL, li_cpu_begin,
  LI_TRAIN(li_cpu_check), LI_TRAIN(li_cpu_norm), LI_TRAIN(li_cpu_update),
  NULL,       /* `update` calls hooks itself */
  NULL, NULL, /* Single tokens run one by one. */
  {
#define LI_OP_KIND(name, tier, reads, cheap) LI_CPU_##name,
#define LI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) \
    LI_CPU_OP(li_elementwise_query, li_elementwise_forward, li_elementwise_backward, \
      (inputs) | LUNA_EACH_IN_PLACE(cheap)),
    LUNA_OPS(LI_OP_KIND, LI_OP_EACH)
#undef LI_OP_EACH
#undef LI_OP_KIND
  }
};

LUNA_API const luna_backend *luna_cpu_backend(void) { return &li_cpu; }

/* Layers, models, trainer and checkpoints have no long loops, so gcc optimizes them for size, and compiles faster. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("Os")
#endif
/* ----------------
   >>metadata: li_fields, one table of all configs' fields. It serves to check configs, to write them to a checkpoint's
   metadata as luna.NAME, to read them back, and to identify the model of a stream's state. In metadata, a field whose
   min is 0 may be absent. A fraction is a float in [0, 1), stored in units of 10^-9, from which the same float is read.
   A new field of a config is a new row. Guarded by tests/files/checkpoints.c.
   ---------------- */
/* In a model's config, vocab and encoder belong to classifier, masked_lm or seq2seq. */
typedef struct li_model_config {
  int64_t vocab;
  luna_encoder_config encoder;
  luna_classifier_config classifier;
  luna_masked_lm_config masked_lm;
  luna_seq2seq_config seq2seq;
  luna_lm_config lm;
} li_model_config;
/* These configs have fields: LI_OF_LM is a luna_lm_config, LI_OF_LAYER a luna_layer_config, and LI_OF_ENCODER an
   li_model_config. All models with an encoder have its metadata; fields of other models are 0 there. */
enum { LI_OF_LM = 1, LI_OF_ENCODER = 2, LI_OF_LAYER = 4, LI_OF_ALL = 7 };
/* Version 0.2 had Linformer, now in examples/attentions. In its files luna.attention is LI_OLD_LINFORMER, and
   a setting is luna.linformer_<key>. Such a file loads with the hook LI_LINFORMER. */
#define LI_OLD_LINFORMER 3
#define LI_LINFORMER "linformer"
/* Describes a field, the configs that have it, and its range. If in_layer, `at` counts from their luna_layer_config. */
typedef struct li_field {
  const char *key;
  uint16_t at;
  uint8_t size, of;
  bool in_layer, fraction;
  int32_t min, max;
} li_field;
#define LI_FIELD(of, config, name, field, in_layer, fraction, min, max) \
  { "luna." #name, (uint16_t)offsetof(config, field), (uint8_t)sizeof(((config *)NULL)->field), of, in_layer, \
    fraction, min, max },
#define LI_LM(name, min, max) LI_FIELD(LI_OF_LM, luna_lm_config, name, name, false, false, min, max)
#define LI_MODEL(name, in, min, max) \
  LI_FIELD(LI_OF_ENCODER, li_model_config, name, in name, false, false, min, max)
#define LI_LAYER_OF(of, name, min, max) LI_FIELD(of, luna_layer_config, name, name, true, false, min, max)
#define LI_LAYER(name, min, max) LI_FIELD(LI_OF_ALL, luna_layer_config, name, name, true, false, min, max)
#define LI_FRACTION(name) LI_FIELD(LI_OF_ALL, luna_layer_config, name, name, true, true, 0, 999999999)
/* A stream's state has a language model's rows in this order, so add new rows at the end. */
static const li_field li_fields[] = {
  LI_LM(vocab, 1, 1 << 24)
  LI_LM(layers, 1, 1024)
  LI_MODEL(vocab, , 1, 1 << 24)
  LI_MODEL(layers, encoder., 1, 1024)
  LI_LAYER(memory, 1, 1 << 20)
  LI_LAYER(dim, 1, 1 << 20)
  LI_LAYER(heads, 1, 1 << 16)
  LI_LAYER_OF(LI_OF_ENCODER, pack_heads, 0, 1 << 16)
  LI_LAYER(ffn, 1, 1 << 22)
  LI_LAYER_OF(LI_OF_LM | LI_OF_LAYER, convolution, 0, 1024)
  LI_LAYER_OF(LI_OF_LM, sharing, 0, LUNA_SHARING_FULL)
  LI_LAYER_OF(LI_OF_ENCODER | LI_OF_LAYER, sharing, 0, LUNA_SHARING_QK)
  LI_LAYER(activation, 1, LUNA_ACTIVATION_NONE)
  LI_LAYER(gated, 0, 1)
  LI_LAYER_OF(LI_OF_LM, omega, LUNA_ACTIVATION_ELU1, LUNA_ACTIVATION_SOFTPLUS2)
  LI_LAYER_OF(LI_OF_ENCODER, omega, 0, LUNA_ACTIVATION_SOFTPLUS2) /* 0 in 0.1 files */
  LI_LAYER(pre_norm, 0, 1)
  LI_LAYER_OF(LI_OF_LM | LI_OF_LAYER, attention, 0, LUNA_ATTENTION_LINEAR)
  LI_LAYER_OF(LI_OF_ENCODER, attention, 0, LI_OLD_LINFORMER)
  LI_LM(positions, 0, LUNA_POSITIONS_LEARNED)
  LI_MODEL(positions, encoder., 1, LUNA_POSITIONS_LEARNED)
  LI_LM(max_length, 0, 1 << 26)
  LI_MODEL(max_length, encoder., 1, 1 << 26)
  LI_MODEL(first_position, encoder., 0, 1 << 26)
  LI_MODEL(embedding_scale, encoder., 0, LUNA_EMBEDDING_SCALE_SQRT_DIM)
  LI_MODEL(norm_embedding, encoder., 0, 1)
  LI_MODEL(tied_layers, encoder., 0, 1)
  LI_LAYER_OF(LI_OF_ENCODER | LI_OF_LAYER, own_memory, 0, 1)
  LI_MODEL(keep_padding, encoder., 0, 1)
  LI_MODEL(classes, classifier., 0, 1 << 24)
  LI_MODEL(pooling, classifier., 0, LUNA_POOLING_MEMORY_BATCH)
  LI_MODEL(pre_logits, classifier., 0, 1 << 22)
  LI_MODEL(pair, classifier., 0, 1)
  LI_MODEL(target_vocab, seq2seq., 0, 1 << 24)
  LI_MODEL(share_embeddings, seq2seq., 0, 1)
  LI_MODEL(separate_output, seq2seq., 0, 1)
  LI_MODEL(decoder_layers, seq2seq., 0, 1024)
  LI_MODEL(max_target_length, seq2seq., 0, 1 << 26)
  LI_LM(features, 0, 1 << 20)
  LI_MODEL(features, encoder., 0, 1 << 20)
  LI_MODEL(per_step, classifier., 0, 1)
  LI_LM(outputs, 0, 1 << 24)
  LI_LAYER(norm, 0, LUNA_NORM_RMS)
  LI_LAYER(forget, 0, LUNA_FORGET_ROUTED)
  LI_LAYER(output_gate, 0, 1)
  LI_LAYER(rotary, 0, 1)
  LI_LM(output_norm, 0, 1)
  LI_FRACTION(dropout)
  LI_FRACTION(attention_dropout)
  LI_FRACTION(activation_dropout)
  LI_LAYER_OF(LI_OF_LAYER, recompute, 0, LUNA_RECOMPUTE_LAYER)
  LI_LAYER_OF(LI_OF_LAYER, horizon, LUNA_HORIZON_NONE, INT32_MAX)
};
/* Returns the row after f (null: the first) for this kind of config, or null at the end. */
LI_FN const li_field *li_field_next(const li_field *f, int kind) {
  for (f = f ? f + 1 : li_fields; f < li_fields + LI_LENGTH(li_fields); f++)
    if (f->of & kind) return f;
  return NULL;
}

LI_FN size_t li_field_at(const li_field *f, int kind) {
  if (f->in_layer && kind == LI_OF_LM) return f->at + offsetof(luna_lm_config, layer);
  if (f->in_layer && kind == LI_OF_ENCODER) return f->at + offsetof(li_model_config, encoder.layer);
  return f->at;
}
LI_FN int64_t li_field_get(const li_field *f, int kind, const void *config) {
  const char *at = (const char *)config + li_field_at(f, kind);
  int64_t number;
  int32_t word;
  float fraction;
  if (f->size == 1) return *(const int8_t *)(const void *)at; /* bool, short enum */
  if (f->size == sizeof number) return memcpy(&number, at, sizeof number), number;
  if (f->fraction) return memcpy(&fraction, at, sizeof fraction), (int64_t)((double)fraction * 1e9 + 0.5);
  return memcpy(&word, at, sizeof word), word;
}
LI_FN void li_field_set(const li_field *f, int kind, void *config, int64_t value) {
  char *at = (char *)config + li_field_at(f, kind);
  const int32_t word = (int32_t)value;
  const float fraction = (float)((double)value * 1e-9);
  if (f->size == 1) *at = (char)value;
  else if (f->size == sizeof value) memcpy(at, &value, sizeof value);
  else if (f->fraction) memcpy(at, &fraction, sizeof fraction);
  else memcpy(at, &word, sizeof word);
}

/* Reports a field that is out of range. */
LI_FN bool li_fields_good(luna_ctx *ctx, int kind, const void *config) {
  float fraction;
  for (const li_field *f = NULL; (f = li_field_next(f, kind)) != NULL;) {
    const char *name = f->key + sizeof "luna." - 1;
    if (f->fraction) {
      memcpy(&fraction, (const char *)config + li_field_at(f, kind), sizeof fraction);
      if (!li_is_probability(ctx, ctx->call, name, fraction)) return false;
    } else if (!li_in(ctx, ctx->call, name, li_field_get(f, kind, config), f->min, f->max)) return false;
  }
  return true;
}
LI_FN bool li_fields_put(luna_params *params, int kind, const void *config) {
  char text[24];
  for (const li_field *f = NULL; (f = li_field_next(f, kind)) != NULL;) {
    li_print(text, sizeof text, "%d", li_field_get(f, kind, config));
    if (li_params_put(params, f->key, text) != LUNA_OK) return false;
  }
  return true;
}

/* A file has this luna.format if luna.h 0.1 did not know its model. Newer models will have larger numbers. */
#define LI_FORMAT 3
#define LI_QUOTE(x) #x
#define LI_QUOTED(x) LI_QUOTE(x)
#define LI_NEWER "its luna.format is newer than that of luna.h " LUNA_VERSION ", " LI_QUOTED(LI_FORMAT)
LI_FN int64_t li_st_number(li_st_text text) {
  int64_t value = 0;
  if (text.size == 0 || text.size > 9) return -1;
  for (size_t i = 0; i < text.size; i++) {
    if (text.at[i] < '0' || text.at[i] > '9') return -1;
    value = value * 10 + (text.at[i] - '0');
  }
  return value;
}
LI_FN bool li_st_is_newer(const li_st *st) {
  li_st_text text;
  if (!li_st_meta(st, "luna.format", &text)) return false;
  const int64_t format = li_st_number(text);
  return format < 0 || format > LI_FORMAT;
}
LI_FN int64_t li_st_horizon(const li_st *st) {
  li_st_text text;
  if (!li_st_meta(st, "luna.horizon", &text)) return 0;
  return li_max(0, li_st_number(text));
}

/* Returns the first field that a file's metadata lacks or has out of range, or null. */
LI_FN const char *li_fields_read(const li_st *st, int kind, void *config) {
  li_st_text text;
  for (const li_field *f = NULL; (f = li_field_next(f, kind)) != NULL;) {
    const bool found = li_st_meta(st, f->key, &text);
    const int64_t value = found ? li_st_number(text) : 0;
    if (value < f->min || value > f->max) return f->key;
    li_field_set(f, kind, config, value);
  }
  return NULL;
}

/* ----------------
   >>impl_layers: a layer's init makes parameters from a table of rows (li_part), and its forward calls ops. An li_flow
   holds the data that passes through a layer. In order: rows; linear, norm and input layers; Luna attention, causal
   Luna attention, the other attentions; encoder, decoder and causal layers. A new field of a config is also a row of
   li_fields, and li_layer_good rejects it for layers without it. Guarded by tests/models/golden.c (the authors' outputs
   and gradients), gradients.c and attention_layers.c.
   ---------------- */
#define LI_MAX_NAME 192
/* Joins prefix and name, with one dot between "fc1." and ".weight". Returns false if they are too long. */
LI_FN bool li_name(luna_params *params, char out[LI_MAX_NAME], const char *prefix, const char *name) {
  if (!prefix) prefix = "";
  const size_t a = strlen(prefix);
  if (a && prefix[a - 1] == '.' && *name == '.') name++;
  const size_t b = strlen(name);

  if (a + b >= LI_MAX_NAME) {
    li_fail_status(params->ctx, LUNA_ERROR_NAME_LENGTH, params->ctx->call, (int64_t)(a + b),
                   (int64_t)LI_MAX_NAME - 1, prefix, name);
    return false;
  }

  memcpy(out, prefix, a);
  memcpy(out + a, name, b + 1);
  return true;
}
LI_FN luna_init li_init(luna_init_kind kind, float scale) {
  const luna_init init = { kind, scale };
  return init;
}
/* A row of a table of parameters makes the tensor name [rows, columns] or a vector [rows], filled by init. With a bias,
   the name ends in ".weight", and ".bias" [rows], zeros, is added. */
#define LI_VECTOR INT32_MIN /* Columns of a vector */
#define LI_MAX_PARTS 24
typedef struct li_part {
  bool has;                     /* False: layer lacks it */
  luna_tensor **weight, **bias; /* Tensors go here; bias may be null. */
  const char *name;
  int64_t rows, columns;
  luna_init init;
} li_part;
#define LI_BOTH(layer) &(layer).weight, &(layer).bias
#define LI_ALONE(tensor) &(tensor), NULL
LI_FN li_part li_norm_part(bool has, luna_norm_layer *norm, const char *name, const luna_layer_config *c) {
  luna_tensor **bias = c->norm == LUNA_NORM_RMS ? NULL : &norm->bias;
  const li_part part = { has, &norm->weight, bias, name, c->dim, LI_VECTOR, li_init(LUNA_INIT_ONES, 0) };
  return part;
}
LI_FN luna_init li_projection_init(bool bert, bool output) {
  if (bert) return li_init(LUNA_INIT_NORMAL, 0.02f);
  return li_init(LUNA_INIT_XAVIER, output ? 1.0f : 0.70710678f);
}
/* Describes a projection of dim numbers to dim. `output` marks an attention's last one. */
LI_FN li_part li_projection(bool has, luna_linear_layer *layer, const char *name, const luna_layer_config *c,
                            bool output) {
  const li_part part = { has, LI_BOTH(*layer), name, c->dim, c->dim, li_projection_init(c->bert_init, output) };
  return part;
}
LI_FN bool li_parts_init(luna_params *params, const char *prefix, const li_part *parts, int count) {
  char name[LI_MAX_NAME];
  for (const li_part *p = parts; p < parts + count; p++) {
    const int64_t shape[] = { p->rows, p->columns };
    if (!p->has) continue;
    if (!li_name(params, name, prefix, p->name)) return false;
    *p->weight = luna_param(params, name, p->columns == LI_VECTOR ? 1 : 2, shape, p->init);
    if (!*p->weight) return false;
    if (!p->bias) continue;
    memcpy(strrchr(name, '.'), ".bias", sizeof ".bias");
    *p->bias = luna_param(params, name, 1, shape, li_init(LUNA_INIT_ZEROS, 0));
    if (!*p->bias) return false;
  }

  return true;
}
/* Defines a layer's public init, LAYER_TYPE_init. `defaults` completes and checks c, a copy of the config. Then it
   makes all of the layer's parameters, or none. */
#define LI_LAYER_INIT(layer_type, defaults, parameters) \
  LUNA_API luna_status layer_type##_init(layer_type *layer, luna_params *params, const char *prefix, \
                                         const luna_layer_config *config) { \
    li_setup s; \
    luna_layer_config c; \
    luna_ctx *ctx = li_ctx_of(params); \
    if (config) c = *config; \
    else memset(&c, 0, sizeof c); \
    const bool good = li_setup_begin(&s, __func__, params, layer, sizeof *layer) && \
                      (defaults) && li_setup_config(&s, &c, sizeof c) && parameters(layer, params, prefix); \
    return li_setup_end(&s, good); \
  }

/* Checks that a forward has an input and an initialised layer, in which `made` is never null. */
LI_FN bool li_layer_made(const luna_tensor *x, const luna_tensor *made, const char *name) {
  if (x && !made) {
    const char *why = x->ctx->failure.error;
    li_fail(x->ctx, LUNA_ERROR_NOT_INITIALIZED, name, *why ? ". What failed: " : "", why);
  }
  if (made && !x) li_fail_null(made->ctx, name, "the input");
  return x && made;
}

LUNA_API luna_status luna_linear_layer_init(luna_linear_layer *layer, luna_params *params, const char *prefix,
                                            int64_t in, int64_t out, luna_init init) {
  luna_linear_layer made = { NULL, NULL };
  const li_part part = { true, LI_BOTH(made), ".weight", out, in, init };
  li_setup s;
  const bool good = li_setup_begin(&s, __func__, params, layer, sizeof *layer) &&
                    li_parts_init(params, prefix, &part, 1) && li_setup_config(&s, &made, sizeof made);
  return li_setup_end(&s, good);
}
LI_FN luna_tensor *li_project(const luna_linear_layer *layer, luna_tensor *x) {
  if (layer->weight) return luna_linear(x, layer->weight, layer->bias);
  return x;
}
LUNA_API luna_tensor *luna_linear_layer_forward(const luna_linear_layer *layer, luna_tensor *x) {
  if (!li_layer_made(x, LI_OF(layer, weight), __func__)) return NULL;
  return li_project(layer, x);
}

LUNA_API luna_status luna_norm_layer_init(luna_norm_layer *layer, luna_params *params, const char *prefix, int64_t dim,
                                          luna_norm_kind kind) {
  luna_norm_layer made = { NULL, NULL };
  luna_layer_config c;
  c.dim = dim;
  c.norm = kind;
  const li_part part = li_norm_part(true, &made, ".weight", &c);
  li_setup s;
  const bool good = li_setup_begin(&s, __func__, params, layer, sizeof *layer) &&
                    li_in(params->ctx, params->ctx->call, "kind", (int64_t)kind, 0, LUNA_NORM_RMS) &&
                    li_parts_init(params, prefix, &part, 1) && li_setup_config(&s, &made, sizeof made);
  return li_setup_end(&s, good);
}
LI_FN luna_tensor *li_normalise(const luna_norm_layer *layer, luna_tensor *x) {
  if (!layer->weight || !x) return x;
  if (layer->bias) return luna_layer_norm(x, layer->weight, layer->bias, 0);
  return luna_rms_norm(x, layer->weight, 0);
}
LUNA_API luna_tensor *luna_norm_layer_forward(const luna_norm_layer *layer, luna_tensor *x) {
  if (!li_layer_made(x, LI_OF(layer, weight), __func__)) return NULL;
  return li_normalise(layer, x);
}

LI_FN int li_input_parts(luna_input_layer *layer, int64_t features, int64_t dim, luna_init init, li_part *parts) {
  const luna_init zeros = li_init(LUNA_INIT_ZEROS, 0), ones = li_init(LUNA_INIT_ONES, 0);
  const li_part all[] = {
    { features != 0, LI_ALONE(layer->mean), "input_norm.mean", features, LI_VECTOR, zeros },
    { features != 0, LI_ALONE(layer->scale), "input_norm.scale", features, LI_VECTOR, ones },
    { features != 0, LI_BOTH(layer->projection), "input_proj.weight", dim, features, init } };
  memcpy(parts, all, sizeof all);
  return LI_LENGTH(all);
}
LUNA_API luna_status luna_input_layer_init(luna_input_layer *layer, luna_params *params, const char *prefix,
                                           int64_t features, int64_t dim, luna_init init) {
  luna_input_layer made = { params, NULL, NULL, { NULL, NULL } };
  li_part parts[LI_MAX_PARTS];
  const int count = li_input_parts(&made, features, dim, init, parts);
  li_setup s;
  const bool good = li_setup_begin(&s, __func__, params, layer, sizeof *layer) &&
                    li_parts_init(params, prefix, parts, count) && li_setup_config(&s, &made, sizeof made);
  return li_setup_end(&s, good);
}
LI_FN bool li_is_real(const luna_input *input, int64_t step) {
  return !input->lengths || step % input->n < input->lengths[step / input->n];
}

/* A model reads tokens below vocab or, if vocab is 0, `features` per step; `longest` 0 means any length. */
typedef struct li_reader { luna_ctx *ctx; int64_t vocab, features, longest; } li_reader;
/* Checks that `r` can read the input. A feature may be Inf only while a fit runs, which sets ctx->call. */
LI_FN bool li_input_fits(const li_reader *r, const luna_input *input, const char *name, const char *what) {
  luna_ctx *ctx = r->ctx;
  char field[100];
  if (!ctx) return false;
  if (!input) return li_refuse(ctx, LUNA_ERROR_NULL_ARGUMENT, name, what);
  const bool tokens = r->vocab > 0;
  const char *own = tokens ? "tokens" : "features";
  const char *other = tokens ? "features" : "tokens";
  const int64_t k = tokens ? 1 : r->features, n = input->n, shape[] = { input->batch, n, k };
  const int64_t count = li_shape_count(3, shape);
  const luna_tensor like = li_like(ctx, 3, shape);
  if (count < 0) return li_refuse(ctx, LUNA_ERROR_SHAPE, name, what, &like, (int64_t)3, LI_MAX_COUNT);
  li_print(field, sizeof field, "%s.%s, which it reads in place of %s,", what, own, other);
  if (count > 0 && (tokens ? !input->tokens : !input->features))
    return li_refuse(ctx, LUNA_ERROR_NULL_ARGUMENT, name, field);
  if (r->longest && n > r->longest) return li_refuse(ctx, LUNA_ERROR_MAX_LENGTH, name, n, r->longest);

  li_print(field, sizeof field, "%s.lengths", what);
  for (int64_t i = 0; input->lengths && i < input->batch; i++)
    if (input->lengths[i] < 0 || input->lengths[i] > n)
      return li_refuse(ctx, LUNA_ERROR_ELEMENT_RANGE, name, field, i, (int64_t)input->lengths[i], (int64_t)0, n);

  li_print(field, sizeof field, "%s.%s", what, own);
  for (int64_t i = 0; i < count && tokens; i++)
    if (input->tokens[i] < 0 || input->tokens[i] >= r->vocab)
      return li_refuse(ctx, LUNA_ERROR_ELEMENT_RANGE, name, field, i, (int64_t)input->tokens[i], (int64_t)0,
                       r->vocab - 1);

  for (int64_t i = 0; i < count && !tokens && !ctx->call; i++) {
    const float x = input->features[i];
    if (!li_is_finite(x) && x == x && li_is_real(input, i / k))
      return li_refuse(ctx, LUNA_ERROR_FEATURE, name, field, i, (double)x);
  }

  return true;
}
/* Checks that an input layer can read the input. Reports no error if its init failed or was not called. */
LI_FN bool li_layer_input_fits(const luna_input_layer *layer, const luna_input *input, const char *name) {
  if (!layer) return false;
  const li_reader r = { li_ctx_of(layer->params), 0, luna_count(layer->mean), 0 };
  if (!r.ctx) return false;
  if (!layer->mean) return li_refuse(r.ctx, LUNA_ERROR_NO_FEATURES, name);
  return li_input_fits(&r, input, name, "input");
}

/* Computes means and deviations (with `inverse`, 1 / deviation) over the finite numbers of an input's real steps.
   Writes both or neither. A constant number gets the deviation 1. */
LI_FN luna_status li_write_fit(const luna_input *input, luna_tensor *mean, luna_tensor *scale, bool inverse,
                               const char *name) {
  luna_ctx *ctx = mean->ctx;
  const int64_t k = luna_count(mean), rows = input->batch * input->n;
  const li_mark mark = li_step_mark(ctx);
  luna_status status = LUNA_OK;
  int64_t found = 0;
  float *means = (float *)li_step_host(ctx, name, li_bytes(2 * k));
  if (!means) return LUNA_OUT_OF_MEMORY;
  float *scales = means + k;

  for (int64_t f = 0; f < k && li_computes(ctx) && status == LUNA_OK; f++) {
    double middle = 0, squares = 0;
    int64_t count = 0;
    /* Welford's recurrence takes one pass and subtracts no large sums. */
    for (int64_t i = 0; i < rows; i++) {
      const double x = (double)input->features[i * k + f], off = x - middle;
      if (!li_is_finite(input->features[i * k + f]) || !li_is_real(input, i)) continue;
      middle += off / (double)++count;
      squares += off * (x - middle);
    }
    const float fit = (float)sqrt((double)count / squares);
    if (fit < FLT_MIN) status = li_fail_status(ctx, LUNA_ERROR_FEATURE_SCALE, name, f);
    found += count;
    means[f] = (float)middle;
    scales[f] = li_is_finite(fit) ? fit : 1;
    if (!inverse) scales[f] = 1 / scales[f];
  }

  if (li_computes(ctx) && k > 0 && found == 0) status = li_fail_status(ctx, LUNA_ERROR_FIT_NOTHING, name, rows, k);
  if (status == LUNA_OK) status = luna_write(scale, scales);
  if (status == LUNA_OK) status = luna_write(mean, means);
  li_step_rewind(ctx, mark);
  return status;
}
LUNA_API luna_status luna_input_layer_fit(luna_input_layer *layer, const luna_input *input) {
  if (!layer || !layer->params) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = layer->params->ctx;
  const char *outer = li_enter(ctx, __func__);
  luna_status status;
  if (!li_layer_input_fits(layer, input, __func__)) status = ctx->last_status;
  else status = li_write_fit(input, layer->mean, layer->scale, true, __func__);
  li_leave(ctx, outer);
  return status;
}
/* Reads an input's features [batch, n, k], with 0 for missing values. With `present`, it reads 1 for all others. */
typedef struct li_features { const luna_input *input; int64_t k; bool present; } li_features;
LI_FN void li_features_fill(float *to, const void *from) {
  const li_features *w = (const li_features *)from;
  for (int64_t i = 0; i < w->input->batch * w->input->n * w->k; i++) {
    const float x = w->input->features[i];
    to[i] = x;
    if (w->present) to[i] = 1;
    if (x != x || !li_is_real(w->input, i / w->k)) to[i] = 0;
  }
}
/* Both tensors are always made, so that a step's memory and ops do not depend on the data. */
LI_FN luna_tensor *li_features_of(luna_ctx *ctx, const luna_input *input, int64_t k, bool present) {
  static const char name[] = "luna_input_layer_forward";
  const int64_t shape[3] = { input->batch, input->n, k };
  const li_features w = { input, k, present };
  luna_tensor *out = luna_tensor_new(ctx, NULL, 3, shape);
  if (!out) return NULL;
  const luna_status status = li_write_made(out, name, li_features_fill, &w);
  if (status == LUNA_OK) return out;
  return li_fail_backend(ctx, name, status);
}

/* Returns whether a feature fits: products of three, which the model forms, must stay in float's range. */
LI_FN bool li_feature_fits(float standardised) { return standardised <= 1e9f && standardised >= -1e9f; }
/* Checks this for all real features of an input, if the host has their means and scales. Also warns once if training
   begins on features far from 1 while means (0) and scales (1) were never set. */
LI_FN bool li_features_fit(const luna_input_layer *layer, const luna_input *input) {
  luna_ctx *ctx = layer->mean->ctx;
  const int64_t k = layer->mean->shape[0];
  const float *mean = layer->mean->data, *scale = layer->scale->data;
  const bool host = !li_on_device(ctx);
  const bool forgotten = ctx->training && !layer->scale->own->given && !layer->mean->own->given;
  double squares = 0;
  int64_t count = 0;
  if (!li_computes(ctx) || !(host || forgotten)) return true;

  for (int64_t i = 0; i < input->batch * input->n * k; i++) {
    const float x = input->features[i];
    if (x != x || !li_is_real(input, i / k)) continue;
    if (host && !li_feature_fits((x - mean[i % k]) * scale[i % k]))
      return li_refuse(ctx, LUNA_ERROR_FEATURE_LARGE, "luna_input_layer_forward", i, (double)x);
    squares += (double)x * (double)x;
    count++;
  }

  if (!forgotten || squares == 0) return true;
  const double size = sqrt(squares / (double)count);
  layer->scale->own->given = true;
  if (size < 0.1 || size > 10)
    li_note(ctx, "luna_input_layer_forward: features whose root mean square is %f are read as they are, since their "
            "means and deviations were never set: call luna_input_layer_fit on training data", size);
  return true;
}
LUNA_API luna_tensor *luna_input_layer_forward(const luna_input_layer *layer, const luna_input *input) {
  if (!li_layer_input_fits(layer, input, __func__) || !li_features_fit(layer, input)) return NULL;
  const luna_scope scope = luna_scope_begin(layer->mean->ctx);
  luna_tensor *x = li_features_of(scope.ctx, input, layer->mean->shape[0], false);
  luna_tensor *present = li_features_of(scope.ctx, input, layer->mean->shape[0], true);
  x = luna_mul(luna_mul(luna_sub(x, luna_detach(layer->mean)), luna_detach(layer->scale)), present);
  return li_result(scope, li_project(&layer->projection, x));
}

LI_FN bool li_is_luna(const luna_layer_config *c) {
  return c->attention == LUNA_ATTENTION_LUNA && !c->hook;
}
/* Rejects a nonzero field that does not apply here. `why` is "with ..." or "in ...". */
LI_FN bool li_is_unused(luna_ctx *ctx, const char *name, int64_t value, const char *why) {
  return value == 0 || li_refuse_call(ctx, LUNA_ERROR_FIELD_UNUSED, ctx->call, name, value, why);
}
/* Fills in any layer's defaults and checks its config. */
LI_FN bool li_layer_defaults(luna_ctx *ctx, luna_layer_config *c) {
  if (c->dim == 0) c->dim = 128;
  if (c->heads == 0) c->heads = 4;
  if (c->pack_heads == 0) c->pack_heads = c->heads;
  if (c->ffn == 0) c->ffn = li_checked(4, c->dim);
  if (c->memory == 0) c->memory = 16;
  if (c->activation == LUNA_ACTIVATION_DEFAULT) c->activation = LUNA_ACTIVATION_RELU;
  if (c->omega == LUNA_ACTIVATION_DEFAULT) c->omega = LUNA_ACTIVATION_SOFTPLUS2;
  return li_fields_good(ctx, LI_OF_LAYER, c) &&
         (li_is_omega((int)c->omega) || li_refuse_call(ctx, LUNA_ERROR_OMEGA, ctx->call, (int64_t)c->omega));
}

/* --- Luna attention [eqs. 3-5]: x [b,n,d], p [b,l,d], context [b,m,d] -> Y_X [b,n,d], Y_P [b,l,d] --- */
LI_FN bool li_divides(luna_ctx *ctx, const char *field, int64_t heads, int64_t dim) {
  if (heads >= 1 && dim % heads == 0) return true;
  return li_refuse_call(ctx, LUNA_ERROR_HEADS, ctx->call, dim, field, heads);
}
LI_FN bool li_is_sequence(const char *name, const char *what, const luna_tensor *t, int64_t batch, int64_t dim) {
  if (t->rank == 3 && t->shape[0] == batch && t->shape[2] == dim) return true;
  return li_refuse(t->ctx, LUNA_ERROR_SEQUENCE_SHAPE, name, what, t, batch, dim);
}
LI_FN luna_init li_embedding_init(int64_t dim, bool bert) {
  return li_init(LUNA_INIT_NORMAL, bert ? 0.02f : (float)(1.0 / sqrt((double)dim)));
}

/* The output gate "gate_proj" is silu(x W_g + b_g). li_gated multiplies y by it, or returns y without a gate. */
LI_FN luna_tensor *li_gate(const luna_linear_layer *gate, luna_tensor *x) {
  return li_linear_activated(x, gate->weight, gate->bias, LUNA_ACTIVATION_SILU);
}
LI_FN luna_tensor *li_gated(const luna_linear_layer *gate, luna_tensor *x, luna_tensor *y) {
  if (gate->weight) return luna_mul(y, li_gate(gate, x));
  return y;
}

LI_FN bool li_nested_attention_init(luna_nested_attention_layer *layer, luna_params *params, const char *prefix) {
  const luna_layer_config *c = &layer->config;
  const bool full = c->sharing == LUNA_SHARING_FULL, tied = c->sharing == LUNA_SHARING_TIED;
  if (!li_divides(params->ctx, "heads", c->heads, c->dim) ||
      !li_divides(params->ctx, "pack_heads", c->pack_heads, c->dim)) return false;
  const li_part parts[] = {
    li_projection(true, &layer->pq, "pq_proj.weight", c, false),
    li_projection(full, &layer->pk, "pk_proj.weight", c, false),
    li_projection(true, &layer->pv, tied ? "pc_proj.weight" : "pv_proj.weight", c, false),
    li_projection(true, &layer->q, "q_proj.weight", c, false),
    li_projection(full, &layer->k, "k_proj.weight", c, false),
    li_projection(true, &layer->v, tied ? "c_proj.weight" : "v_proj.weight", c, false),
    li_projection(true, &layer->out, "out_proj.weight", c, true),
    li_projection(c->output_gate, &layer->gate, "gate_proj.weight", c, false) };
  if (!li_parts_init(params, prefix, parts, LI_LENGTH(parts))) return false;
  if (tied) { layer->pk = layer->pv; layer->k = layer->v; }
  if (c->sharing == LUNA_SHARING_QK) { layer->pk = layer->pq; layer->k = layer->q; }
  return true;
}
/* luna_nested_attention_layer_init */
LI_LAYER_INIT(luna_nested_attention_layer, li_layer_defaults(ctx, &c) &&
              li_is_unused(ctx, "causal", c.causal, "in attention that is not causal"),
              li_nested_attention_init)

/* Splits heads, [batch, n, h d_h] -> [batch, h, n, d_h], or merges them. A single row has the same order in both. */
LI_FN luna_tensor *li_split_heads(luna_tensor *x, int64_t heads) {
  if (!x) return NULL;
  const int64_t n = x->shape[1], d_h = x->shape[2] / heads;
  if (n == 1) return li_reshape(x, 4, x->shape[0], heads, 1, d_h);
  return li_permute(li_reshape(x, 4, x->shape[0], n, heads, d_h), 0, 2, 1, 3);
}
LI_FN luna_tensor *li_merge_heads(luna_tensor *x) {
  if (!x) return NULL;
  const int64_t n = x->shape[2], d = x->shape[1] * x->shape[3];
  return li_reshape(n == 1 ? x : li_permute(x, 0, 2, 1, 3), 3, x->shape[0], n, d, 1);
}
/* Returns a projection's weight by heads, [h, d_h, d]. Without a projection, that is the identity. */
LI_FN luna_tensor *li_weight_heads(luna_ctx *ctx, const luna_linear_layer *layer, int64_t dim, int64_t heads) {
  const float one = 1;
  const int64_t shape[] = { heads, dim / heads, dim };
  luna_status status = LUNA_OK;
  if (layer->weight) return luna_reshape(layer->weight, 3, shape);
  luna_tensor *w = luna_tensor_new(ctx, NULL, 3, shape);
  for (int64_t i = 0; w && li_computes(ctx) && i < dim && status == LUNA_OK; i++)
    status = ctx->backend->copy(ctx, w->data + i * dim + i, &one, sizeof one, 1);
  if (status == LUNA_OK) return w;
  return li_fail_backend(ctx, "luna_nested_attention_layer_forward", status);
}

/* Limits lengths, if there are any, to `max`, in memory of the step. Returns false if memory is out. */
LI_FN bool li_lengths_below(luna_ctx *ctx, const int32_t **lengths, int64_t count, int64_t max) {
  if (!*lengths) return true;
  int32_t *out = (int32_t *)li_step_host(ctx, "lengths", (size_t)count * sizeof(int32_t));
  for (int64_t i = 0; out && i < count; i++) out[i] = (int32_t)li_min((*lengths)[i], max);
  *lengths = out;
  return out != NULL;
}

/* Folded pack: G_h = scale pq_h Wpk_h (the key bias cancels), Z = softmax(G C^T) C, Y_P,h = Z_h Wpv_h^T + r_h bpv_h. pq
   is [b,l,d], G and Z [b,h l,d], C [b,m,d]; r has the softmax's row sums after dropout. */
LI_FN luna_tensor *li_pack_folded(const luna_nested_attention_layer *layer, luna_tensor *pq, luna_tensor *context,
                                  const int32_t *lengths) {
  if (!pq) return NULL;
  const int64_t d = layer->config.dim, h = layer->config.pack_heads, b = pq->shape[0], l = pq->shape[1];
  luna_tensor *sums = NULL;
  const luna_pack_config config = { lengths, layer->config.attention_dropout, &sums };
  luna_tensor *g = luna_matmul(li_split_heads(luna_scale(pq, (float)(1.0 / sqrt((double)(d / h)))), h),
                               li_weight_heads(pq->ctx, &layer->pk, d, h), false, false);
  luna_tensor *z = luna_pack(li_reshape(g, 3, b, h * l, d, 1), context, &config);
  z = luna_matmul(li_reshape(z, 4, b, h, l, d), li_weight_heads(pq->ctx, &layer->pv, d, h), false, true);
  luna_tensor *bias = luna_matmul(li_reshape(sums, 4, b, h, l, 1), li_reshape(layer->pv.bias, 3, h, 1, d / h, 1),
                                  false, false);
  return li_merge_heads(luna_add(z, bias));
}

/* Folded unpack: K'_h = scale k_h Wq_h with bias scale k_h bq_h, and V'_h = v_h Wo_h^T; K', V' [b,h,l,d]. */
LI_FN luna_tensor *li_unpack_folded(const luna_nested_attention_layer *layer, luna_tensor *x,
                                    luna_tensor *packed_context, luna_tensor *residual, float dropout,
                                    const int32_t *lengths) {
  const int64_t d = layer->config.dim, h = layer->config.heads;
  const int64_t b = packed_context->shape[0], l = packed_context->shape[1];
  luna_tensor *k = li_split_heads(luna_scale(li_project(&layer->k, packed_context),
                                             (float)(1.0 / sqrt((double)(d / h)))), h);
  luna_tensor *v = li_split_heads(li_project(&layer->v, packed_context), h);
  luna_tensor *bias = luna_matmul(k, li_reshape(layer->q.bias, 3, h, d / h, 1, 1), false, false);
  luna_tensor *out = li_reshape(li_permute(layer->out.weight, 1, 0, 2, 3), 3, h, d / h, d, 1);
  luna_tensor *in[6];
  in[0] = x, in[1] = luna_matmul(k, li_weight_heads(x->ctx, &layer->q, d, h), false, false);
  in[2] = li_reshape(bias, 3, b, h, l, 1), in[3] = luna_matmul(v, out, false, false);
  in[4] = layer->out.bias, in[5] = residual;
  return li_unpack_with(in, lengths, layer->config.attention_dropout, dropout);
}

/* Returns whether the folded form costs less. It takes 4 h l d flops per row, and 4 l d d in products per sequence. The
   other takes 2 d d in products for each projection of the long side, and 4 l d, per row. */
LI_FN bool li_fold(luna_ctx *ctx, int64_t rows, int64_t dim, int64_t heads, int64_t slots, int64_t projections) {
  const double d = (double)dim, l = (double)slots, n = (double)rows, cost = (double)ctx->backend->product_cost;
  const double products = (cost > 0 ? cost : 1) * d * d;
  if (ctx->options.form != LUNA_FORM_CHEAPEST) return ctx->options.form == LUNA_FORM_FOLDED;
  return n * 4 * (double)heads * l * d + 4 * l * products < n * (2 * (double)projections * products + 4 * l * d);
}

/* Computes the first half, eq. 3: p [b,l,d], context [b,m,d] -> Y_P [b,l,d], folded or by attention (1).
   li_attention_row is its reference. */
LI_FN luna_tensor *li_nested_pack(const luna_nested_attention_layer *layer, luna_tensor *p, luna_tensor *context,
                                  const int32_t *lengths) {
  const luna_layer_config *c = &layer->config;
  const bool own_keys = c->sharing == LUNA_SHARING_FULL || c->sharing == LUNA_SHARING_QK;
  luna_tensor *pq = li_project(&layer->pq, p);
  if (li_fold(p->ctx, context->shape[1], c->dim, c->pack_heads, p->shape[1], 1 + own_keys))
    return li_pack_folded(layer, pq, context, lengths);
  luna_attention_config a = li_attention_config(c->pack_heads, c->attention_dropout, lengths);
  luna_tensor *pv = li_project(&layer->pv, context);
  return luna_softmax_attention(pq, c->sharing == LUNA_SHARING_TIED ? pv : li_project(&layer->pk, context), pv, &a);
}

/* Computes the second half, eq. 4: x [b,n,d], y_p [b,l,d] -> dropout(Y_X) + residual [b,n,d]. residual may be null. */
LI_FN luna_tensor *li_nested_unpack(const luna_nested_attention_layer *layer, luna_tensor *x, luna_tensor *y_p,
                                    luna_tensor *residual, float dropout, const int32_t *lengths) {
  const luna_layer_config *c = &layer->config;
  if (!y_p || !li_lengths_below(x->ctx, &lengths, x->shape[0], y_p->shape[1])) return NULL;
  if (!c->output_gate && li_fold(x->ctx, x->shape[1], c->dim, c->heads, y_p->shape[1], 2))
    return li_unpack_folded(layer, x, y_p, residual, dropout, lengths);
  luna_attention_config a = li_attention_config(c->heads, c->attention_dropout, lengths);
  luna_tensor *v = li_project(&layer->v, y_p);
  luna_tensor *k = c->sharing == LUNA_SHARING_TIED ? v : li_project(&layer->k, y_p);
  luna_tensor *y = luna_softmax_attention(li_project(&layer->q, x), k, v, &a);
  y = li_gated(&layer->gate, x, y);
  return li_linear_with(y, layer->out.weight, layer->out.bias, LI_NO_ACTIVATION, residual, dropout);
}
/* Does the same in a stream, which has keys and values. Sequences of one source become queries side by side. */
LI_FN luna_tensor *li_unpack_past(const luna_nested_attention_layer *layer, luna_tensor *x, luna_tensor *residual,
                                  li_past *past) {
  const luna_attention_config a = li_attention_config(layer->config.heads, 0, past->source_slots);
  luna_tensor *q = li_project(&layer->q, x);
  q = li_reshape(q, 3, past->sources, x->shape[0] * x->shape[1] / past->sources, x->shape[2], 1);
  luna_tensor *y = luna_softmax_attention(q, &past->keys, &past->values, &a);
  y = li_gated(&layer->gate, x, luna_reshape(y, 3, x->shape));
  return li_linear_with(y, layer->out.weight, layer->out.bias, LI_NO_ACTIVATION, residual, 0);
}

/* Holds a layer's x and P, which become X' and P' if these are wanted. */
typedef struct li_flow {
  luna_tensor *x, *p;
  luna_tensor *context;   /* Is packed; null: x */
  const int32_t *lengths; /* The context's */
  bool wants_x, wants_p, causal;
  li_past *past;          /* A stream's layer has it instead of p, context and lengths. */
  int64_t horizon;        /* Causal Luna's; 0: none */
} li_flow;
LI_FN li_flow li_flow_of(luna_tensor *x, luna_tensor *p, const int32_t *lengths) {
  const li_flow f = { x, p, NULL, lengths, true, false, false, NULL, 0 };
  return f;
}

/* f->x becomes dropout(Y_X) + residual, which may be null, and f->p becomes Y_P. */
LI_FN bool li_nested_attention(const luna_nested_attention_layer *layer, li_flow *f, luna_tensor *residual,
                               float dropout) {
  static const char name[] = "luna_nested_attention_layer_forward";
  luna_tensor *x = f->x, *context = f->context, *y = NULL;
  if (!context) context = x;
  if (!li_layer_made(x, LI_OF(layer, pq.weight), name)) return false;
  if (!f->p) return li_refused(li_fail_null(x->ctx, name, "p"));
  const int64_t batch = x->shape[0], d = layer->config.dim;
  if (!li_is_sequence(name, "x", x, batch, d) || !li_is_sequence(name, "p", f->p, batch, d) ||
      !li_is_sequence(name, "context", context, batch, d)) return false;
  const luna_scope scope = luna_scope_begin(x->ctx);
  f->p = li_nested_pack(layer, f->p, context, f->lengths); /* Eq. 3 */
  if (f->wants_x) y = f->x = li_nested_unpack(layer, x, f->p, residual, dropout, f->lengths); /* Eq. 4 */
  (void)li_results(scope, f->p, y);
  return f->p && f->x;
}
LUNA_API luna_tensor *luna_nested_attention_layer_forward(const luna_nested_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, luna_tensor *context, const int32_t *lengths,
                                                          luna_tensor **packed_context) {
  li_flow f = li_flow_of(x, p, lengths);
  f.context = context;
  if (!li_nested_attention(layer, &f, NULL, 0)) return NULL;
  if (packed_context) *packed_context = f.p;
  return f.x;
}

/* --- Causal Luna attention [section 3.3]: x [b,n,d], p [b,l,d] or [l,d] -> y [b,n,d] --- */
/* Returns whether a layer has a P. A routed memory has none. */
LI_FN bool li_packs(const luna_layer_config *c) { return li_is_luna(c) && c->forget != LUNA_FORGET_ROUTED; }
LI_FN bool li_routes(luna_ctx *ctx, const luna_layer_config *c) {
  return !li_is_luna(c) || li_packs(c) || li_in(ctx, ctx->call, "layer.memory", c->memory, 2, INT32_MAX);
}
LI_FN int li_causal_attention_parts(luna_causal_attention_layer *layer, li_part *parts) {
  const luna_layer_config *c = &layer->config;
  const bool full = c->sharing == LUNA_SHARING_FULL, packs = li_packs(c);
  const bool gates = c->forget == LUNA_FORGET_GATED || c->forget == LUNA_FORGET_CONSTANT;
  const int64_t slots = c->heads * c->memory;

  const li_part all[] = {
    li_projection(packs, &layer->pq, "pq_proj.weight", c, false),
    li_projection(packs, &layer->pc, "pc_proj.weight", c, false),
    li_projection(true, &layer->q, "q_proj.weight", c, false),
    li_projection(full, &layer->k, "k_proj.weight", c, false),
    li_projection(true, &layer->v, full ? "v_proj.weight" : "c_proj.weight", c, false),
    li_projection(true, &layer->out, "out_proj.weight", c, true),
    li_projection(c->output_gate, &layer->gate, "gate_proj.weight", c, false),
    { c->forget == LUNA_FORGET_GATED, LI_ALONE(layer->forget.weight), "forget_proj.weight", slots, c->dim,
      li_init(LUNA_INIT_XAVIER, 0.5f) },
    { gates, LI_ALONE(layer->forget.bias), "forget_proj.bias", slots, LI_VECTOR,
      li_init(LUNA_INIT_FORGET, (float)c->memory) },
    { !packs, LI_BOTH(layer->router), "router_proj.weight", slots, c->dim, li_init(LUNA_INIT_XAVIER, 1) },
    { !packs, LI_BOTH(layer->strength), "strength_proj.weight", c->heads, c->dim, li_init(LUNA_INIT_XAVIER, 0.5f) },
    { !packs, LI_ALONE(layer->fade), "fade", c->heads, LI_VECTOR,
      li_init(LUNA_INIT_FADE, c->memory <= 16 ? 1024 : 4096) } };
  memcpy(parts, all, sizeof all);
  return LI_LENGTH(all);
}
LI_FN bool li_causal_attention_init(luna_causal_attention_layer *layer, luna_params *params, const char *prefix) {
  li_part parts[LI_MAX_PARTS];
  if (!li_divides(params->ctx, "heads", layer->config.heads, layer->config.dim) ||
      !li_parts_init(params, prefix, parts, li_causal_attention_parts(layer, parts))) return false;
  if (layer->config.sharing == LUNA_SHARING_TIED) layer->k = layer->v;
  return true;
}
/* luna_causal_attention_layer_init */
LI_LAYER_INIT(luna_causal_attention_layer, li_layer_defaults(ctx, &c) && li_routes(ctx, &c) &&
              li_in(ctx, ctx->call, "sharing", (int64_t)c.sharing, 0, LUNA_SHARING_FULL),
              li_causal_attention_init)

/* Returns pq = (P Wpq + bpq) / sqrt(d_h): p [b, l, d] or [l, d] -> [b, h, l, d_h]. */
LI_FN luna_tensor *li_causal_queries(const luna_causal_attention_layer *layer, luna_tensor *p) {
  const int64_t d = layer->config.dim, h = layer->config.heads;
  luna_tensor *pq = luna_scale(li_project(&layer->pq, p), (float)(1.0 / sqrt((double)(d / h))));
  return li_split_heads(li_reshape(pq, 3, p->rank == 2 ? 1 : p->shape[0], p->shape[p->rank - 2], d, 1), h);
}
/* Folds Wpc into pq: returns g = pq_h Wpc_h [b, h, l, d], for scores X g^T. *bias, unless null, becomes pq_h bpc_h
   [b, h, l, 1]. */
LI_FN luna_tensor *li_causal_folded(const luna_causal_attention_layer *layer, luna_tensor *pq, luna_tensor **bias) {
  const int64_t d = layer->config.dim, h = layer->config.heads;
  luna_tensor *g = luna_matmul(pq, li_reshape(layer->pc.weight, 3, h, d / h, d, 1), false, false);
  if (bias) *bias = luna_matmul(pq, li_reshape(layer->pc.bias, 3, h, d / h, 1, 1), false, false);
  return g;
}
/* Raw pack scores are s [batch, n, h l] = k_p pq^T with k_p = X Wpc + bpc; folded, X (pq_h Wpc_h)^T + pq_h bpc_h. The
   key bias does not cancel here, because omega is no softmax. In a stream, `past` has pq or its folded form. */
LI_FN luna_tensor *li_scores_past(const luna_causal_attention_layer *layer, luna_tensor *x, li_past *past) {
  const int64_t h = layer->config.heads, n = past->sources, rows = x->shape[0] * x->shape[1];
  const luna_scope scope = luna_scope_begin(x->ctx);
  const bool split = n > 1 || x->shape[0] > 1;
  luna_tensor *s = split ? li_reshape(x, 3, n, rows / n, x->shape[2], 1) : x;
  if (past->scores_bias.rank == 0) {
    s = li_split_heads(li_project(&layer->pc, s), h);
    s = li_merge_heads(luna_matmul(s, &past->scores, false, true));
  } else if (n == 1) s = luna_linear(s, &past->scores, &past->scores_bias);
  else s = luna_add(li_matmul_by(s, &past->scores, false, true, li_is_single_row(x)), &past->scores_bias);
  if (s && split) s = li_reshape(s, 3, x->shape[0], x->shape[1], s->shape[2], 1);
  return li_result(scope, s);
}

/* Returns these scores outside streams, folded if that costs less. */
LI_FN luna_tensor *li_causal_scores(const luna_causal_attention_layer *layer, luna_tensor *x, luna_tensor *p) {
  const int64_t d = layer->config.dim, h = layer->config.heads, l = p->shape[p->rank - 2];
  const bool shared = p->rank == 2 || p->shape[0] == 1;
  luna_tensor *pq = li_causal_queries(layer, p), *bias;

  if (!li_fold(x->ctx, x->shape[1] * (shared ? x->shape[0] : 1), d, h, l, 1)) {
    luna_tensor *k = li_split_heads(li_project(&layer->pc, x), h);
    if (shared && pq) pq = li_reshape(pq, 3, h, l, d / h, 1);
    return li_merge_heads(luna_matmul(k, pq, false, true));
  }

  luna_tensor *g = li_causal_folded(layer, pq, &bias);
  if (shared) return luna_linear(x, li_reshape(g, 2, h * l, d, 1, 1), li_reshape(bias, 1, h * l, 1, 1, 1));
  const int64_t b = p->shape[0];
  g = luna_matmul(x, li_reshape(g, 3, b, h * l, d, 1), false, true);
  return luna_add(g, li_reshape(bias, 3, b, 1, h * l, 1));
}

/* Returns forget gates' logits [batch, n, h slots]: x F^T + f, or f alone; the first ones if p has fewer slots. */
LI_FN luna_tensor *li_forget_logits(const luna_causal_attention_layer *layer, luna_tensor *x, int64_t slots) {
  const int64_t h = layer->config.heads, l = layer->config.memory, d = layer->config.dim;
  luna_tensor *weight = layer->forget.weight, *bias = layer->forget.bias;
  if (slots > l) return li_fail(x->ctx, LUNA_ERROR_FORGET_SLOTS, slots, l);
  if (slots < l) {
    bias = li_reshape(luna_slice(li_reshape(bias, 2, h, l, 1, 1), 1, 0, slots), 1, h * slots, 1, 1, 1);
    if (weight)
      weight = li_reshape(luna_slice(li_reshape(weight, 3, h, l, d, 1), 1, 0, slots), 2, h * slots, d, 1, 1);
  }
  if (layer->forget.weight) return luna_linear(x, weight, bias);
  return li_reshape(luna_expand(bias, x->shape[0] * x->shape[1]), 3, x->shape[0], x->shape[1], h * slots, 1);
}

/* Returns dropout(y) + residual [b,n,d], with y from x and the memory f->p. residual may be null. */
LI_FN luna_tensor *li_causal_attention(const luna_causal_attention_layer *layer, luna_tensor *x,
                                       luna_tensor *residual, float dropout, const li_flow *f) {
  static const char name[] = "luna_causal_attention_layer_forward";
  luna_tensor *p = f->p, *s;
  if (!li_layer_made(x, LI_OF(layer, q.weight), name)) return NULL;
  const luna_layer_config *c = &layer->config;
  const bool stream = x->ctx->bump, packs = li_packs(c);
  if (!p && !stream && packs) return li_fail_null(x->ctx, name, "p");
  if (!li_is_sequence(name, "x", x, x->shape[0], c->dim)) return NULL;
  if (!stream && packs && (p->rank < 2 || p->rank > 3 || li_last(p) != c->dim ||
                  (p->rank == 3 && p->shape[0] != x->shape[0] && p->shape[0] != 1)))
    return li_fail(x->ctx, LUNA_ERROR_MEMORY_SHAPE, name, p, c->dim, x->shape[0], c->dim);
  const luna_scope scope = luna_scope_begin(x->ctx);
  const int32_t *lengths = stream ? f->past->slots : f->lengths;
  if (!packs) {
    /* A view is not rounded to 8 bits. */
    luna_tensor *router = li_reshape(layer->router.weight, 2, c->heads * c->memory, c->dim, 1, 1);
    s = luna_route(luna_linear(x, router, layer->router.bias), li_project(&layer->strength, x));
    lengths = NULL;
  } else if (stream) s = li_scores_past(layer, x, f->past);
  else if (li_lengths_below(x->ctx, &lengths, x->shape[0], p->shape[p->rank - 2])) s = li_causal_scores(layer, x, p);
  else return NULL;
  luna_tensor *q = li_project(&layer->q, x);
  luna_tensor *v = li_project(&layer->v, x);
  luna_tensor *k = c->sharing == LUNA_SHARING_TIED ? v : li_project(&layer->k, x), *gates = NULL;
  if (!packs) gates = layer->fade;
  else if (c->forget && s) gates = li_forget_logits(layer, x, li_last(s) / c->heads);
  if (c->forget && !gates) return li_result(scope, NULL);
  luna_tensor *const in[] = { q, k, v, s };
  const luna_causal_nested_config nested = { c->heads, c->omega, lengths, c->attention_dropout, gates, f->horizon,
                                             !packs };
  v = li_gated(&layer->gate, x, li_causal_nested(in, &nested, f->past));
  return li_result(scope, li_linear_with(v, layer->out.weight, layer->out.bias, LI_NO_ACTIVATION, residual, dropout));
}
LUNA_API luna_tensor *luna_causal_attention_layer_forward(const luna_causal_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, const int32_t *lengths) {
  li_flow f = li_flow_of(x, p, lengths);
  f.horizon = LI_OF(layer, config.horizon);
  return li_causal_attention(layer, x, NULL, 0, &f);
}

/* --- Baseline attentions (softmax, linear): x [b,n,d], context [b,m,d] -> y [b,n,d] --- */
LI_FN bool li_attention_init(luna_attention_layer *layer, luna_params *params, const char *prefix) {
  const luna_layer_config *c = &layer->config;
  const li_part parts[] = {
    li_projection(true, &layer->q, "q_proj.weight", c, false),
    li_projection(true, &layer->k, "k_proj.weight", c, false),
    li_projection(true, &layer->v, "v_proj.weight", c, false),
    li_projection(true, &layer->out, "out_proj.weight", c, true),
    li_projection(c->output_gate, &layer->gate, "gate_proj.weight", c, false) };
  if (!li_divides(params->ctx, "heads", c->heads, c->dim)) return false;
  if (c->rotary && c->attention == LUNA_ATTENTION_SOFTMAX && c->dim / c->heads % 2 != 0)
    return li_refuse_call(params->ctx, LUNA_ERROR_ROTARY_ODD, params->ctx->call, c->dim / c->heads);
  return li_parts_init(params, prefix, parts, LI_LENGTH(parts));
}
LI_FN bool li_attention_defaults(luna_ctx *ctx, luna_layer_config *c, bool given) {
  if (!given) c->attention = LUNA_ATTENTION_SOFTMAX;
  return li_layer_defaults(ctx, c) &&
         li_in(ctx, ctx->call, "attention", (int64_t)c->attention, LUNA_ATTENTION_SOFTMAX, LUNA_ATTENTION_LINEAR);
}

/* luna_attention_layer_init */
LI_LAYER_INIT(luna_attention_layer, li_attention_defaults(ctx, &c, config != NULL), li_attention_init)

/* Features phi are elu + 1. A column of ones beside each head's values gives the normaliser: out = phi(q) sum phi(k)^T
   [v 1], divided by its last column. */
LI_FN luna_tensor *li_linear_attention(luna_tensor *const qkv[3], int64_t heads, bool causal, const int32_t *lengths) {
  luna_tensor *q = qkv[0], *k = qkv[1], *v = qkv[2];
  if (!q || !k || !v) return NULL;
  const int64_t batch = v->shape[0], n = v->shape[1], width = v->shape[2], shape[] = { batch, n, heads, 1 };
  luna_tensor *parts[2] = { li_reshape(v, 4, batch, n, heads, width / heads), NULL };
  parts[1] = luna_tensor_full(v->ctx, 1, 4, shape);
  v = luna_mask(li_reshape(luna_concat(parts, 2, 3), 3, batch, n, width + heads, 1), lengths);
  q = luna_elu1(q);
  k = luna_mask(luna_elu1(k), lengths);

  if (causal) {
    luna_tensor *y = luna_causal_product(q, k, v, heads);
    y = luna_ratio(li_reshape(y, 4, batch, n, heads, width / heads + 1));
    return li_reshape(y, 3, batch, n, width, 1);
  }

  luna_tensor *y = luna_matmul(li_split_heads(k, heads), li_split_heads(v, heads), true, false);
  return li_merge_heads(luna_ratio(luna_matmul(li_split_heads(q, heads), y, false, false)));
}

LUNA_API luna_tensor *luna_attention_layer_forward(const luna_attention_layer *layer, luna_tensor *x,
                                                   luna_tensor *context, const int32_t *lengths) {
  luna_tensor *qkv[3];
  if (!li_layer_made(x, LI_OF(layer, q.weight), __func__)) return NULL;
  const luna_layer_config *c = &layer->config;
  if (!context) context = x;
  if (!li_is_sequence(__func__, "x", x, x->shape[0], c->dim) ||
      !li_is_sequence(__func__, "context", context, x->shape[0], c->dim)) return NULL;
  const luna_scope scope = luna_scope_begin(x->ctx);
  qkv[0] = li_project(&layer->q, x);
  qkv[1] = li_project(&layer->k, context);
  qkv[2] = li_project(&layer->v, context);
  const bool softmax = c->attention == LUNA_ATTENTION_SOFTMAX;
  for (int i = 0; i < 2 && c->rotary && softmax && context == x; i++)
    qkv[i] = luna_rotary(qkv[i], c->heads, 0, 0);
  luna_attention_config a = li_attention_config(c->heads, c->attention_dropout, lengths);
  a.causal = c->causal;
  luna_tensor *y;
  if (softmax) y = luna_softmax_attention(qkv[0], qkv[1], qkv[2], &a);
  else y = li_linear_attention(qkv, c->heads, c->causal, lengths);
  return li_result(scope, li_project(&layer->out, li_gated(&layer->gate, x, y)));
}

/* --- Encoder, decoder and causal layers [eq. 6]: x [b,n,d], p [b,l,d] -> X' [b,n,d], P' [b,l,d] --- */
/* Completes a config and rejects fields that this kind of layer lacks. Fields of other attentions are ignored, so that
   changing `attention` alone compares them. */
typedef enum li_layer_kind { LI_ENCODER_LAYER, LI_DECODER_LAYER, LI_CAUSAL_LAYER } li_layer_kind;
LI_FN bool li_layer_good(luna_ctx *ctx, luna_layer_config *c, li_layer_kind kind) {
  const bool causal = kind == LI_CAUSAL_LAYER, encoder = kind == LI_ENCODER_LAYER;
  const bool tied = causal && li_is_luna(c) && c->sharing != LUNA_SHARING_FULL;
  static const char other[] = "in an encoder or decoder layer";
  if (c->hook && !li_is_unused(ctx, "layer.attention", c->attention, "with a hook")) return false;
  if (!causal && (!li_is_unused(ctx, "layer.causal", c->causal, other) ||
                  !li_is_unused(ctx, "layer.convolution", c->convolution, other))) return false;
  if (!encoder && !li_is_unused(ctx, "layer.own_memory", c->own_memory, "in a causal or decoder layer")) return false;
  if (tied && !li_is_unused(ctx, "layer.sharing", c->sharing, "or LUNA_SHARING_FULL in a causal layer")) return false;
  if (kind == LI_DECODER_LAYER && c->forget == LUNA_FORGET_ROUTED &&
      !li_is_unused(ctx, "layer.forget", c->forget, "to 2 in a decoder layer")) return false;
  c->causal = causal;
  return li_layer_defaults(ctx, c) && (!causal || c->hook || li_routes(ctx, c)) &&
         li_is_given(ctx, ctx->call, "layer.hook->init or layer.hook->forward",
                     !c->hook || (c->hook->init && c->hook->forward));
}
LI_FN int li_feed_forward_parts(luna_feed_forward_layer *layer, const luna_layer_config *c, li_part *parts) {
  const luna_init init = li_projection_init(c->bert_init, true);
  const li_part all[] = {
    { true, LI_BOTH(layer->fc1), "fc1.weight", c->ffn, c->dim, init },
    { true, LI_BOTH(layer->fc2), "fc2.weight", c->dim, c->ffn, init },
    { c->gated, LI_BOTH(layer->fc3), "fc3.weight", c->ffn, c->dim, init },
    li_norm_part(true, &layer->norm, "final_layer_norm.weight", c) };
  memcpy(parts, all, sizeof all);
  return LI_LENGTH(all);
}

/* Ends a half-layer. Returns its sum, normed if post-norm. */
LI_FN luna_tensor *li_sum_normed(const luna_layer_config *c, luna_tensor *sum, const luna_norm_layer *norm) {
  if (c->pre_norm) return sum;
  return li_normalise(norm, sum);
}
LI_FN luna_tensor *li_residual(const luna_layer_config *c, luna_tensor *x, luna_tensor *y,
                               const luna_norm_layer *norm) {
  return li_sum_normed(c, luna_add(x, luna_dropout(y, c->dropout)), norm);
}
/* Begins a half-layer. Returns its input, normed if pre-norm. */
LI_FN luna_tensor *li_normed(const luna_layer_config *c, luna_tensor *x, const luna_norm_layer *norm) {
  if (c->pre_norm) return li_normalise(norm, x);
  return x;
}

/* Computes a layer's second half, x + FFN(x), and ends its scope. p, unless null, survives beside it. */
LI_FN luna_tensor *li_ffn_half(luna_scope *scope, const luna_layer_config *c,
                               const luna_feed_forward_layer *layer, luna_tensor *x, luna_tensor *p) {
  x = li_results_so_far(scope, x, p);
  /* A layer that is recomputed as a whole need not hold its hidden layer even then. */
  const luna_feed_forward_config f = { c->activation, c->activation_dropout, c->dropout, x,
                                       c->recompute != LUNA_RECOMPUTE_NONE, layer->fc3.weight, layer->fc3.bias };
  x = luna_feed_forward(li_normed(c, x, &layer->norm), layer->fc1.weight, layer->fc1.bias, layer->fc2.weight,
                        layer->fc2.bias, &f);
  x = li_results_so_far(scope, x, p);
  return li_results(*scope, li_sum_normed(c, x, &layer->norm), p);
}

/* --- Other attentions and hooks --- */
LI_FN bool li_other_init(luna_attention_layer *other_attention, void **hook_state, luna_params *params,
                         const char *prefix, const luna_layer_config *c) {
  luna_ctx *ctx = params->ctx;
  if (c->hook) {
    const li_part gate = li_projection(c->output_gate, &other_attention->gate, "gate_proj.weight", c, false);
    if (!li_parts_init(params, prefix, &gate, 1)) return false;
    li_hooked *hooked = (li_hooked *)li_persist_host(ctx, ctx->call, sizeof *hooked);
    if (!hooked) return false;
    *hook_state = c->hook->init(c->hook->user, params, prefix, c);
    if (!*hook_state && ctx->last_status == LUNA_OK)
      li_fail_status(ctx, LUNA_ERROR_HOOK_INIT, ctx->call, prefix);
    if (!*hook_state) return false;
    hooked->older = ctx->hooked;
    hooked->close = c->hook->close;
    hooked->layer = *hook_state;
    ctx->hooked = hooked;
    return true;
  }

  other_attention->config = *c;
  return li_attention_init(other_attention, params, prefix);
}

/* Returns f->x + attention(x). With pre-norm, x is f->x after the norm. f->p becomes a hook's next_p, else null. */
LI_FN luna_tensor *li_other(const luna_layer_config *c, const luna_attention_layer *other_attention,
                            void *hook_state, luna_tensor *x, const luna_norm_layer *norm, li_flow *f) {
  const char *name = f->causal ? "luna_causal_layer_forward" : "luna_encoder_layer_forward";
  luna_attention_call call;
  luna_tensor *y;
  memset(&call, 0, sizeof call);
  call.x = x;
  call.input = f->x;
  if (c->pre_norm) call.norm = norm;
  call.p = f->p;
  call.lengths = f->lengths;
  call.causal = f->causal;
  f->p = NULL;

  if (x && c->hook) {
    if (c->output_gate) call.gate = li_gate(&other_attention->gate, x);
    y = c->hook->forward(hook_state, &call);
    f->p = call.next_p;
    for (int i = 0; i < LI_LENGTH(call.kept); i++) (void)luna_keep(call.kept[i]);
    if (!y && x->ctx->status == LUNA_OK) return li_fail(x->ctx, LUNA_ERROR_HOOK_NULL, name);
    if (y && !li_is_like(y, x)) return li_fail(x->ctx, LUNA_ERROR_HOOK_SHAPE, name, y, x);
  } else y = luna_attention_layer_forward(other_attention, x, NULL, f->lengths);

  return li_residual(c, f->x, y, norm);
}

LI_FN bool li_encoder_layer_init(luna_encoder_layer *layer, luna_params *params, const char *prefix) {
  const luna_layer_config *c = &layer->config;
  const bool is_luna = li_is_luna(c);
  const luna_init init = li_embedding_init(c->dim, false);
  li_part parts[LI_MAX_PARTS] = {
    { is_luna && c->own_memory, LI_ALONE(layer->memory), "projected_embeddings", c->memory, c->dim, init },
    li_norm_part(true, &layer->attention_norm, "self_attn_layer_norm.weight", c),
    li_norm_part(is_luna, &layer->memory_norm, "self_atten_proj_layer_norm.weight", c) };
  const int count = 3 + li_feed_forward_parts(&layer->feed_forward, c, parts + 3);
  char name[LI_MAX_NAME];
  if (is_luna) layer->attention.config = *c;
  bool good = li_name(params, name, prefix, "self_attn.") && li_parts_init(params, prefix, parts, 1);
  if (good && is_luna) good = li_nested_attention_init(&layer->attention, params, name);
  else if (good) good = li_other_init(&layer->other_attention, &layer->hook_state, params, name, c);
  return good && li_parts_init(params, prefix, parts + 1, count - 1);
}

/* luna_encoder_layer_init */
LI_LAYER_INIT(luna_encoder_layer, li_layer_good(ctx, &c, LI_ENCODER_LAYER), li_encoder_layer_init)

/* Computes Luna attention with both residuals: eq. 6 without its last line. */
LI_FN bool li_nested_half(const luna_layer_config *c, const luna_nested_attention_layer *attention,
                          const luna_norm_layer *norm, const luna_norm_layer *memory_norm, li_flow *f) {
  const luna_scope scope = luna_scope_begin(f->x ? f->x->ctx : NULL);
  li_flow in = *f;
  in.x = li_normed(c, f->x, norm);
  in.p = li_normed(c, f->p, memory_norm);
  if (!li_nested_attention(attention, &in, f->x, c->dropout)) return false;
  if (f->wants_x) f->x = li_sum_normed(c, in.x, norm);
  if (f->wants_p) f->p = li_residual(c, f->p, in.p, memory_norm);
  (void)li_results(scope, f->wants_x ? f->x : NULL, f->wants_p ? f->p : NULL);
  return (!f->wants_x || f->x) && (!f->wants_p || f->p);
}

/* f->p is unchanged if P' is not wanted or does not exist. `scope` holds the layer's input, which its end also
   releases. */
LI_FN bool li_encoder_layer(const luna_encoder_layer *layer, luna_scope *scope, li_flow *f) {
  luna_tensor *p = f->p;
  luna_scope own;
  if (!li_layer_made(f->x, LI_OF(layer, feed_forward.fc1.weight), "luna_encoder_layer_forward"))
    return false;
  const luna_layer_config *c = &layer->config;
  if (li_is_luna(c) && !p && !layer->memory)
    return li_refused(li_fail_null(f->x->ctx, "luna_encoder_layer_forward", "p"));
  if (c->recompute == LUNA_RECOMPUTE_LAYER) {
    own = luna_scope_recompute(f->x->ctx);
    scope = &own;
  }

  if (!li_is_luna(c)) {
    luna_tensor *y = li_normed(c, f->x, &layer->attention_norm);
    f->x = li_other(c, &layer->other_attention, layer->hook_state, y, &layer->attention_norm, f);
  } else {
    if (layer->memory) {
      f->p = luna_slice(layer->memory, 0, 0, li_min(c->memory, li_max(1, f->x->shape[1])));
      f->p = luna_expand(f->p, f->x->shape[0]);
    }
    if (!li_nested_half(c, &layer->attention, &layer->attention_norm, &layer->memory_norm, f)) return false;
  }

  if (!f->wants_p) f->p = NULL;
  if (f->wants_x) f->x = li_ffn_half(scope, c, &layer->feed_forward, f->x, f->p); /* End of eq. 6 */
  else (void)li_result(*scope, f->p);
  if (!f->p) f->p = p;
  return f->x != NULL;
}
LUNA_API luna_tensor *luna_encoder_layer_forward(const luna_encoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 const int32_t *lengths) {
  li_flow f = li_flow_of(x, p ? *p : NULL, lengths);
  f.wants_p = p != NULL;
  luna_scope scope = luna_scope_begin(x ? x->ctx : NULL);
  if (!li_encoder_layer(layer, &scope, &f)) return NULL;
  if (p) *p = f.p;
  return f.x;
}

LI_FN bool li_is_luna_only(luna_ctx *ctx, const char *what) {
  return li_refuse_call(ctx, LUNA_ERROR_LUNA_ONLY, ctx->call, what);
}
LI_FN bool li_decoder_layer_init(luna_decoder_layer *layer, luna_params *params, const char *prefix) {
  const luna_layer_config *c = &layer->config;
  li_part parts[LI_MAX_PARTS] = {
    li_norm_part(true, &layer->self_norm, "self_attn_layer_norm.weight", c),
    li_norm_part(true, &layer->cross_norm, "encoder_attn_layer_norm.weight", c),
    li_norm_part(true, &layer->memory_norm, "encoder_atten_proj_layer_norm.weight", c) };
  const int count = 3 + li_feed_forward_parts(&layer->feed_forward, c, parts + 3);
  char name[LI_MAX_NAME];
  layer->self_attention.config = layer->cross_attention.config = *c;
  if (c->sharing != LUNA_SHARING_FULL) layer->self_attention.config.sharing = LUNA_SHARING_TIED;
  return li_name(params, name, prefix, "self_attn.") &&
         li_causal_attention_init(&layer->self_attention, params, name) &&
         li_parts_init(params, prefix, parts, 1) && li_name(params, name, prefix, "encoder_attn.") &&
         li_nested_attention_init(&layer->cross_attention, params, name) &&
         li_parts_init(params, prefix, parts + 1, count - 1);
}

/* luna_decoder_layer_init */
LI_LAYER_INIT(luna_decoder_layer, (li_is_luna(&c) || li_is_luna_only(ctx, "a decoder layer")) &&
              li_layer_good(ctx, &c, LI_DECODER_LAYER), li_decoder_layer_init)

/* Returns X', also in f->x. */
LI_FN luna_tensor *li_decoder_layer(const luna_decoder_layer *layer, li_flow *f) {
  luna_tensor *x = f->x;
  if (!li_layer_made(x, LI_OF(layer, feed_forward.fc1.weight), "luna_decoder_layer_forward")) return NULL;
  if (!f->past && (!f->p || !f->context))
    return li_fail_null(x->ctx, "luna_decoder_layer_forward", f->p ? "context" : "p");
  const luna_layer_config *c = &layer->config;
  luna_scope scope = luna_scope_begin_as(x->ctx, __func__, c->recompute == LUNA_RECOMPUTE_LAYER);
  x = li_causal_attention(&layer->self_attention, li_normed(c, x, &layer->self_norm), x, c->dropout, f);
  f->x = x = li_result_so_far(&scope, li_sum_normed(c, x, &layer->self_norm));
  if (f->past) {
    x = li_unpack_past(&layer->cross_attention, li_normed(c, x, &layer->cross_norm), x, f->past);
    f->x = li_sum_normed(c, x, &layer->cross_norm);
  } else if (!li_nested_half(c, &layer->cross_attention, &layer->cross_norm, &layer->memory_norm, f)) return NULL;
  return f->x = li_ffn_half(&scope, c, &layer->feed_forward, f->x, f->wants_p ? f->p : NULL);
}
LUNA_API luna_tensor *luna_decoder_layer_forward(const luna_decoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 luna_tensor *context, const int32_t *lengths) {
  li_flow f = li_flow_of(x, p ? *p : NULL, lengths);
  f.context = context;
  f.wants_p = p != NULL;
  f.horizon = LI_OF(layer, config.horizon);
  x = li_decoder_layer(layer, &f);
  if (x && p) *p = f.p;
  return x;
}

/* Lists a causal layer's own parameters. memory and kernel come before the attention's. */
LI_FN int li_causal_layer_parts(luna_causal_layer *layer, li_part *parts) {
  const luna_layer_config *c = &layer->config;
  const int64_t d = c->dim, width = c->convolution;
  const luna_init init = li_embedding_init(d, false), last = li_init(LUNA_INIT_IDENTITY, 0.1f);
  const li_part own[] = {
    { li_packs(c), LI_ALONE(layer->memory), "projected_embeddings", c->memory, d, init },
    { width != 0, &layer->kernel, &layer->kernel_bias, "conv.weight", d, width, last },
    li_norm_part(true, &layer->attention_norm, "self_attn_layer_norm.weight", c) };
  memcpy(parts, own, sizeof own);
  return LI_LENGTH(own) + li_feed_forward_parts(&layer->feed_forward, c, parts + LI_LENGTH(own));
}
LI_FN bool li_causal_layer_init(luna_causal_layer *layer, luna_params *params, const char *prefix) {
  const luna_layer_config *c = &layer->config;
  li_part parts[LI_MAX_PARTS];
  const int count = li_causal_layer_parts(layer, parts);
  char name[LI_MAX_NAME];
  if (li_is_luna(c)) layer->attention.config = *c;
  bool good = li_name(params, name, prefix, "self_attn.") && li_parts_init(params, prefix, parts, 2);
  if (good && li_is_luna(c)) good = li_causal_attention_init(&layer->attention, params, name);
  else if (good) good = li_other_init(&layer->other_attention, &layer->hook_state, params, name, c);
  return good && li_parts_init(params, prefix, parts + 2, count - 2);
}

/* luna_causal_layer_init */
LI_LAYER_INIT(luna_causal_layer, li_layer_good(ctx, &c, LI_CAUSAL_LAYER), li_causal_layer_init)

/* Convolution, attention, feed-forward. In a stream or with a carried state, `past` has what earlier rows left. */
LI_FN luna_tensor *li_causal_layer(const luna_causal_layer *layer, luna_tensor *x, li_past *past, int64_t horizon) {
  if (!li_layer_made(x, LI_OF(layer, feed_forward.fc1.weight), "luna_causal_layer_forward")) return NULL;
  const luna_layer_config *c = &layer->config;
  luna_scope scope = luna_scope_begin_as(x->ctx, __func__, c->recompute == LUNA_RECOMPUTE_LAYER);
  li_flow f = li_flow_of(x, layer->memory, NULL);
  f.causal = true;
  f.past = past;
  f.horizon = horizon;
  luna_tensor *y = li_normed(c, x, &layer->attention_norm);
  if (layer->kernel && past && past->before && y)
    y = li_carried_convolution(y, layer->kernel, layer->kernel_bias, past);
  else if (layer->kernel) y = li_short_convolution(y, layer->kernel, layer->kernel_bias, past);
  if (li_is_luna(c)) {
    y = li_causal_attention(&layer->attention, y, x, c->dropout, &f);
    y = li_sum_normed(c, y, &layer->attention_norm);
  } else {
    y = li_other(c, &layer->other_attention, layer->hook_state, y, &layer->attention_norm, &f);
  }

  return li_ffn_half(&scope, c, &layer->feed_forward, y, NULL);
}
LUNA_API luna_tensor *luna_causal_layer_forward(const luna_causal_layer *layer, luna_tensor *x) {
  return li_causal_layer(layer, x, NULL, LI_OF(layer, config.horizon));
}

/* ----------------
   >>impl_models: each model has defaults (which also check its config), an init and a forward. In order: the language
   model's parameters and their description in a file; positions; hooks in files; what inits share; the causal language
   model, encoder, classifier, masked language model and encoder-decoder. A new model has an LI_MODEL_INIT, rows of
   li_fields, and a kind that luna_load_model knows. Guarded by tests/models/golden.c and the tests that include
   tests/models.h.
   ---------------- */
#define LI_LM_KIND "causal_lm"
#define LI_LM_BEFORE 5 /* Parts before the layers */
LI_FN int li_lm_parts(luna_lm *model, li_part *parts) {
  const luna_lm_config *c = &model->config;
  const bool learned = c->positions == LUNA_POSITIONS_LEARNED;
  const int64_t d = c->layer.dim;
  const luna_init init = li_embedding_init(d, c->layer.bert_init);
  const luna_init projection = li_projection_init(c->layer.bert_init, true);
  const int inputs = li_input_parts(&model->input, c->features, d, projection, parts);
  const li_part all[] = {
    { !c->features, LI_ALONE(model->embedding), "embed_tokens.weight", c->vocab, d, init },
    { learned, LI_ALONE(model->positions), "embed_positions.weight", c->max_length, d, init },
    li_norm_part(c->layer.pre_norm, &model->norm, "layer_norm.weight", &c->layer),
    { c->outputs != 0, LI_BOTH(model->output), "output_projection.weight", c->outputs, d, projection },
    { c->output_norm, LI_ALONE(model->output_mean), "output_norm.mean", c->outputs, LI_VECTOR,
      li_init(LUNA_INIT_ZEROS, 0) },
    { c->output_norm, LI_ALONE(model->output_scale), "output_norm.scale", c->outputs, LI_VECTOR,
      li_init(LUNA_INIT_ONES, 0) } };
  memcpy(parts + inputs, all, sizeof all);
  return inputs + LI_LENGTH(all);
}
#define LI_NO_KIND \
  "it has no luna.kind, as no model with an attention hook without a name or of layers of your own has: init it as " \
  "it was, then luna_load"
#define LI_NO_LAYERS "its tensors are not those of luna.layers layers"
#define LI_NO_HEADS "luna.dim is not a multiple of luna.heads"
LI_FN int64_t li_lm_outputs(const luna_lm_config *c) { return c->outputs ? c->outputs : c->vocab; }

/* Returns whether a tensor is luna.h's own, such as an optimiser's moments. */
LI_FN bool li_st_ours(li_st_text name) { return name.size >= 5 && memcmp(name.at, "luna.", 5) == 0; }

/* Counts the model's tensors in a file, and their elements. An I8 tensor and its shape[0] scales count once. */
LI_FN int64_t li_st_tensors(const li_st *st, double *numbers) {
  li_st_tensor t;
  size_t cursor = 0;
  int64_t count = 0;
  while (li_st_next(st, &cursor, &t)) {
    if (li_st_ours(t.name)) continue;
    count += t.dtype != LI_ST_I8;
    if (numbers) *numbers += (double)t.count - (t.dtype == LI_ST_I8 && t.rank > 0 ? (double)t.shape[0] : 0);
  }
  return count;
}

/* Does the same for parts. */
LI_FN int64_t li_parts_tensors(const li_part *parts, int count, double *numbers) {
  int64_t tensors = 0;
  for (const li_part *p = parts; p < parts + count; p++) {
    if (!p->has) continue;
    const int64_t bias = p->bias != NULL;
    tensors += 1 + bias;
    *numbers += (double)p->rows * (double)((p->columns == LI_VECTOR ? 1 : p->columns) + bias);
  }
  return tensors;
}

/* Sizes in a file's metadata are untrusted. Before memory is laid out by them, this compares the numbers of tensors and
   elements with the file's. */
LI_FN const char *li_lm_claims(const li_st *st, const luna_lm_config *c) {
  li_part parts[LI_MAX_PARTS];
  luna_lm model;
  luna_causal_layer layer;
  double numbers = 0, each = 0, found = 0;
  model.config = *c;
  layer.config = c->layer;
  layer.attention.config = c->layer;
  int64_t tensors = li_parts_tensors(parts, li_causal_attention_parts(&layer.attention, parts), &each);
  tensors += li_parts_tensors(parts, li_causal_layer_parts(&layer, parts), &each);
  tensors = c->layers * tensors + li_parts_tensors(parts, li_lm_parts(&model, parts), &numbers);
  if (li_st_tensors(st, &found) != tensors) return LI_NO_LAYERS;
  if (found != numbers + (double)c->layers * each) return "its tensors are not of the sizes in its metadata";
  return NULL;
}

/* Reads the config of a checkpoint's model, without dropouts. Returns null, or what is wrong. */
LI_FN const char *li_lm_read(const li_st *st, luna_lm_config *config) {
  li_st_text text;
  memset(config, 0, sizeof *config);
  if (!li_st_meta(st, "luna.kind", &text)) return LI_NO_KIND;
  if (!li_st_equal(text, LI_LM_KIND)) return "it holds no causal language model of luna.h";
  if (li_st_is_newer(st)) return LI_NEWER;
  if (li_fields_read(st, LI_OF_LM, config) || (config->output_norm && !config->outputs) ||
      (config->layer.forget == LUNA_FORGET_ROUTED && config->layer.memory < 2))
    return "a size of the model is missing from the metadata, or out of range";
  if (config->layer.attention || li_st_meta(st, "luna.hook", &text))
    return "only Luna attention streams in constant memory";
  if (config->layer.dim % config->layer.heads) return LI_NO_HEADS;
  return li_lm_claims(st, config);
}

LI_FN void li_sinusoid(int64_t position, int64_t d, float *out) {
  const int64_t half = d / 2;
  double s, c;
  for (int64_t i = 0; i < half; i++) {
    li_sine((double)position * li_frequency(i, li_sinusoid_rate(half)), &s, &c);
    out[i] = (float)s;
    out[half + i] = (float)c;
  }
  if (d % 2) out[d - 1] = 0;
}

/* Returns the sinusoids of positions first .. first + n - 1, [n, d]. */
LI_FN luna_tensor *li_sinusoids(luna_ctx *ctx, int64_t first, int64_t n, int64_t d) {
  li_build s;
  int64_t shape[2] = { n, d };
  li_start_in(&s, ctx, LUNA_OP_SINUSOIDS, "sinusoidal positions");
  s.op.arg.sinusoids.first = first;
  return li_finish(&s, 2, shape);
}

/* Returns x [b,n,d] + positions from `first` on: sinusoids, or rows of a learned table. */
LI_FN luna_tensor *li_add_positions(luna_tensor *x, luna_positions positions, luna_tensor *table, int64_t first) {
  if (!x || positions == LUNA_POSITIONS_NONE || positions == LUNA_POSITIONS_DEFAULT) return x;
  if (positions == LUNA_POSITIONS_SINUSOIDAL)
    return luna_add(x, li_sinusoids(x->ctx, first, x->shape[1], x->shape[2]));
  if (first + x->shape[1] > table->shape[0])
    return li_fail(x->ctx, LUNA_ERROR_MAX_LENGTH, "learned positions", x->shape[1], table->shape[0] - first);
  return luna_add(x, luna_slice(table, 0, first, x->shape[1]));
}

/* --- Attention hooks in files --- */
#define LI_HOOK_KEY "luna.hook"
#define LI_HOOK_PREFIX LI_HOOK_KEY "."
#define LI_HOOK_TEXT 1024 /* Bytes per key, value */
LI_FN bool li_hook_put(void *file, const char *key, const char *value) {
  char full[LI_HOOK_TEXT];
  if (strlen(key) + sizeof LI_HOOK_PREFIX > sizeof full || strlen(value) >= LI_HOOK_TEXT) return false;
  li_print(full, sizeof full, LI_HOOK_PREFIX "%s", key);
  return li_params_put((luna_params *)file, full, value) == LUNA_OK;
}
typedef struct li_hook_file {
  const li_st *st;
  const char *prefix; /* The settings' keys' */
  char value[LI_HOOK_TEXT];
} li_hook_file;
LI_FN const char *li_hook_get(void *file, const char *key) {
  li_hook_file *f = (li_hook_file *)file;
  char full[LI_HOOK_TEXT];
  li_st_text text;
  if (strlen(key) + strlen(f->prefix) >= sizeof full) return NULL;
  li_print(full, sizeof full, "%s%s", f->prefix, key);
  if (!li_st_meta(f->st, full, &text)) return NULL;
  if (li_st_decode(text, f->value, sizeof f->value) < sizeof f->value) return f->value;
  return NULL;
}
LI_FN bool li_hook_fails(luna_ctx *ctx, const luna_attention_hook *hook, const char *done) {
  if (ctx->last_status == LUNA_OK) li_fail_status(ctx, LUNA_ERROR_HOOK_SETTINGS, ctx->call, hook->name, done);
  return false;
}
LI_FN bool li_hook_describe(luna_params *params, const luna_attention_hook *hook) {
  if (!li_in(params->ctx, params->ctx->call, "the length of layer.hook->name", (int64_t)strlen(hook->name), 1,
             LI_HOOK_NAME - 1)) return false;
  if (li_params_put(params, LI_HOOK_KEY, hook->name) != LUNA_OK) return false;
  return !hook->save || hook->save(hook->user, li_hook_put, params) || li_hook_fails(params->ctx, hook, "saved");
}
LI_FN bool li_st_is_linformer(const li_st *st) {
  li_st_text text;
  return !li_st_meta(st, LI_HOOK_KEY, &text) && li_st_meta(st, "luna.attention", &text) &&
         li_st_number(text) == LI_OLD_LINFORMER;
}

/* Finds the hook that a file names and loads its settings. *hook becomes null if the file names none. */
LI_FN bool li_hook_load(luna_ctx *ctx, const li_st *st, const luna_attention_hook **hook) {
  const luna_attention_hook *const *at = ctx->options.hooks;
  li_hook_file file;
  li_st_text text;
  char name[LI_HOOK_NAME];
  *hook = NULL;
  file.st = st;
  file.prefix = LI_HOOK_PREFIX;

  if (li_st_is_linformer(st)) {
    file.prefix = "luna." LI_LINFORMER "_";
    text.at = LI_LINFORMER;
    text.size = sizeof LI_LINFORMER - 1;
  } else if (!li_st_meta(st, LI_HOOK_KEY, &text)) return true;
  (void)li_st_decode(text, name, sizeof name);
  while (at && *at && !((*at)->name && li_st_equal(text, (*at)->name))) at++;
  if (!at || !*at)
    return li_fail_status(ctx, LUNA_ERROR_HOOK_UNKNOWN, ctx->call, li_file_name(ctx), name) == LUNA_OK;
  *hook = *at;
  return !(*at)->load || (*at)->load((*at)->user, li_hook_get, &file) || li_hook_fails(ctx, *at, "loaded");
}

/* Stores the model's name and its config's fields as text pairs. A model whose hook has no name gets none. */
LI_FN bool li_fields_describe(luna_params *params, const char *name, const luna_layer_config *layer, int kind,
                              const void *config) {
  const luna_attention_hook *hook = layer->hook;
  const bool described = (hook && !hook->name) ||
      (li_params_put(params, "luna.kind", name) == LUNA_OK && (!hook || li_hook_describe(params, hook)) &&
       li_fields_put(params, kind, config) &&
       (!(layer->forget || layer->output_gate || layer->rotary) ||
        li_params_put(params, "luna.format", layer->forget == LUNA_FORGET_ROUTED ? "3" : "2") == LUNA_OK));
  if (described) li_params_fix_horizon(params, layer->horizon);
  return described;
}

/* Makes a model's layers "PREFIXlayers.N."; null after an error. */
LI_FN void *li_layers_init(luna_params *params, const char *prefix, li_layer_kind kind, int64_t count,
                           const luna_layer_config *config, int64_t max_length) {
  static const size_t sizes[] = { sizeof(luna_encoder_layer), sizeof(luna_decoder_layer), sizeof(luna_causal_layer) };
  luna_layer_config c = *config;
  luna_status status = LUNA_OK;
  char name[LI_MAX_NAME], number[32];
  char *layers = (char *)li_persist_host(params->ctx, params->ctx->call, (size_t)count * sizes[kind]);
  c.layers = count;
  c.max_length = max_length;

  for (c.layer = 0; layers && c.layer < count && status == LUNA_OK; c.layer++) {
    void *layer = layers + (size_t)c.layer * sizes[kind];
    li_print(number, sizeof number, "layers.%d.", c.layer);
    if (!li_name(params, name, prefix, number)) return NULL;
    if (kind == LI_ENCODER_LAYER) status = luna_encoder_layer_init((luna_encoder_layer *)layer, params, name, &c);
    if (kind == LI_DECODER_LAYER) status = luna_decoder_layer_init((luna_decoder_layer *)layer, params, name, &c);
    if (kind == LI_CAUSAL_LAYER) status = luna_causal_layer_init((luna_causal_layer *)layer, params, name, &c);
  }

  if (status == LUNA_OK) return layers;
  return NULL;
}

/* Defines a model's public init, luna_<kind>_init, from li_<kind>_defaults and li_<kind>_init. `name` is its kind in
   metadata, and `layer` its layers' config. `described`, of kind `of`, is checked and becomes metadata. */
#define LI_MODEL_INIT(kind, name, layer, described, of) \
  LUNA_API luna_status luna_##kind##_init(luna_##kind *model, luna_params *params, \
                                          const luna_##kind##_config *config) { \
    li_setup s; \
    li_model_config m; \
    memset(&m, 0, sizeof m); \
    if (config) m.kind = *config; \
    const bool good = li_setup_begin(&s, __func__, params, model, sizeof *model) && \
                      li_##kind##_defaults(params->ctx, &m) && \
                      li_fields_good(params->ctx, of, &described) && \
                      li_setup_config(&s, &m.kind, sizeof m.kind) && li_##kind##_init(model, params) && \
                      li_fields_describe(params, name, &layer, of, &described); \
    return li_setup_end(&s, good); \
  }
#define LI_ENCODER_MODEL_INIT(kind) LI_MODEL_INIT(kind, #kind, m.encoder.layer, m, LI_OF_ENCODER)

/* --- Causal language model: input [b,n] -> logits [b,n,vocab] --- */
LI_FN bool li_lm_defaults(luna_ctx *ctx, li_model_config *m) {
  luna_lm_config *c = &m->lm;
  if (c->vocab == 0) c->vocab = 256;
  if (c->outputs == 0) c->outputs = c->features;
  if (c->layers == 0) c->layers = 2;
  if (c->positions == LUNA_POSITIONS_DEFAULT) c->positions = LUNA_POSITIONS_NONE;
  if (c->max_length == 0) c->max_length = 512;
  return li_layer_good(ctx, &c->layer, LI_CAUSAL_LAYER) &&
         (c->outputs > 0 || li_is_unused(ctx, "output_norm", c->output_norm, "without outputs"));
}
LI_FN bool li_lm_init(luna_lm *model, luna_params *params) {
  const luna_lm_config *c = &model->config;
  li_part parts[LI_MAX_PARTS];
  const int count = li_lm_parts(model, parts);
  model->params = model->input.params = params;
  if (!li_parts_init(params, "", parts, LI_LM_BEFORE)) return false;
  model->layers = (luna_causal_layer *)li_layers_init(params, "", LI_CAUSAL_LAYER, c->layers, &c->layer, c->max_length);
  return model->layers && li_parts_init(params, "", parts + LI_LM_BEFORE, count - LI_LM_BEFORE);
}

/* luna_lm_init */
LI_MODEL_INIT(lm, LI_LM_KIND, m.lm.layer, m.lm, LI_OF_LM)

/* Returns what a model's embedding reads. The first token has position `first`. */
LI_FN li_reader li_reader_of(const luna_params *params, const luna_tensor *table,
                             const luna_input_layer *input, const luna_tensor *positions, int64_t first) {
  const int64_t vocab = table ? table->shape[0] : 0;
  const int64_t features = input ? luna_count(input->mean) : 0;
  const li_reader r = { li_ctx_of(params), vocab, features, positions ? positions->shape[0] - first : 0 };
  return r;
}

/* Returns the model's context if its init succeeded and the input fits, else null. */
LI_FN luna_ctx *li_lm_ctx(const luna_lm *m, const luna_input *input, const char *name) {
  if (!m) return NULL;
  const li_reader r = li_reader_of(m->params, m->embedding, &m->input, m->positions, 0);
  if (!li_input_fits(&r, input, name, "input")) return NULL;
  return r.ctx;
}

LI_FN int32_t li_label(const luna_input *input, const int32_t *labels, int64_t i) {
  if (li_is_real(input, i)) return labels[i];
  return -1;
}

/* Returns the cross-entropy of luna_linear(x, weight, bias), or of x if weight is null, for an input's labels. */
LI_FN luna_tensor *li_labels_loss(const char *name, luna_tensor *const in[3], const luna_input *input,
                                  const int32_t *labels, const luna_cross_entropy_config *config) {
  luna_tensor *x = in[0];
  const int64_t all = input->batch * input->n;
  if (x && labels && input->lengths) {
    int32_t *real = (int32_t *)li_step_host(x->ctx, name, (size_t)all * sizeof *real);
    if (!real) return NULL;
    for (int64_t i = 0; i < all; i++) real[i] = li_label(input, labels, i);
    labels = real;
  }
  if (!in[1]) return li_cross_entropy_loss(name, x, labels, config);
  return li_linear_cross_entropy_loss(name, x, in[1], in[2], labels, config);
}
LI_FN luna_part li_part_of(const luna_ctx *ctx) {
  const luna_part whole = { 0, 0, 0 };
  if (ctx->shares) return ctx->part;
  return whole;
}
LUNA_API luna_tensor *luna_as_part(luna_tensor *x) {
  if (!x || li_is_released(x, __func__)) return NULL;
  if (!x->ctx->shares) return x;
  if (x->rank < 1) return li_fail(x->ctx, LUNA_ERROR_AXIS, __func__, x, (int64_t)0);
  luna_tensor *y = luna_reshape(x, x->rank, x->shape);
  if (!y) return NULL;
  y->own->cut.first = x->ctx->part.first;
  y->own->cut.own = x->shape[0];
  return y;
}

/* Embeds tokens by a table or, if that is null, features: -> [batch,n,dim]. */
LI_FN luna_tensor *li_embedded(luna_tensor *table, const luna_input_layer *layer, const luna_input *input) {
  if (!table) return luna_as_part(luna_input_layer_forward(layer, input));
  return luna_as_part(luna_embedding(table, input->tokens, input->batch, input->n));
}

/* Returns the length of an input's longest sequence, at least 1, or the whole batch's, `whole`, if that is positive. */
LI_FN int64_t li_longest(const luna_input *input, int64_t whole) {
  if (whole > 0) return whole;
  const int64_t n = li_max(input->n, 1);
  int64_t longest = input->lengths ? 1 : n;
  if (input->lengths)
    for (int64_t b = 0; b < input->batch; b++) longest = li_max(longest, input->lengths[b]);
  return li_min(longest, n);
}

LI_FN bool li_state_take(const luna_lm *model, const luna_input *input, luna_lm_state **state);
LI_FN int64_t li_state_position(const luna_lm_state *state);
LI_FN li_past li_state_layer(luna_lm_state *state, int64_t layer);
LI_FN luna_tensor *li_state_written(const luna_lm *model, luna_tensor *x, int64_t rows);
/* Returns the features [b,n,d] that the logits are computed from. */
LI_FN luna_tensor *li_lm_features(const luna_lm *model, const luna_input *input) {
  luna_scope scope = luna_scope_begin(model->params->ctx);
  luna_lm_state *state;
  if (!li_state_take(model, input, &state)) return NULL;
  luna_tensor *x = li_embedded(model->embedding, &model->input, input);
  x = li_result_so_far(&scope, li_add_positions(x, model->config.positions, model->positions,
                                                     li_state_position(state)));
  x = li_result_so_far(&scope, luna_dropout(x, model->config.layer.dropout));
  const int64_t horizon = li_params_horizon(model->params, li_longest(input, li_part_of(scope.ctx).longest));
  for (int64_t i = 0; i < model->config.layers; i++) {
    li_past past = li_state_layer(state, i);
    x = li_result_so_far(&scope, li_causal_layer(&model->layers[i], x, state ? &past : NULL, horizon));
  }
  return li_result(scope, li_normalise(&model->norm, x));
}
LUNA_API luna_status luna_lm_fit_outputs(luna_lm *model, const float *targets, int64_t rows) {
  if (!model || !model->params) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = model->params->ctx;
  if (!li_is_given(ctx, __func__, "the model's output_scale, which an init with .output_norm = true makes,",
                   model->output_scale != NULL) ||
      !li_is_given(ctx, __func__, "targets", targets || rows <= 0) ||
      !li_in(ctx, __func__, "rows", rows, 0, LI_MAX_COUNT / luna_count(model->output_mean))) return ctx->last_status;
  const luna_input input = { NULL, NULL, 1, rows, targets };
  const char *outer = li_enter(ctx, __func__);
  const luna_status status = li_write_fit(&input, model->output_mean, model->output_scale, false, __func__);
  li_leave(ctx, outer);
  return status;
}

LI_FN luna_tensor *li_lm_output(const luna_lm *model) {
  if (model->output.weight) return model->output.weight;
  return model->embedding;
}
LUNA_API luna_tensor *luna_lm_forward(const luna_lm *model, const luna_input *input) {
  luna_ctx *ctx = li_lm_ctx(model, input, __func__);
  const luna_scope scope = luna_scope_begin(ctx);
  if (!ctx) return NULL;
  luna_tensor *scale = model->output_scale;
  if (scale && ctx->training && !scale->own->given && li_computes(ctx))
    return li_fail(ctx, LUNA_ERROR_OUTPUTS_NOT_FITTED, __func__);
  luna_tensor *y = luna_linear(li_lm_features(model, input), li_lm_output(model), model->output.bias);
  if (scale) y = luna_add(luna_mul(y, luna_detach(scale)), luna_detach(model->output_mean));
  return li_state_written(model, li_result(scope, y), input->n);
}
LUNA_API luna_tensor *luna_lm_loss(const luna_lm *model, const luna_input *input, const int32_t *labels) {
  luna_ctx *ctx = li_lm_ctx(model, input, __func__);
  const luna_scope scope = luna_scope_begin(ctx);
  if (!ctx) return NULL;
  luna_tensor *in[3] = { NULL, NULL, NULL };
  if (model->output_scale) in[0] = luna_lm_forward(model, input);
  else {
    in[0] = li_lm_features(model, input);
    in[1] = li_lm_output(model);
    in[2] = model->output.bias;
  }

  if (!in[0]) return NULL;
  luna_tensor *loss = li_labels_loss(__func__, in, input, labels, NULL);
  return li_state_written(model, li_result(scope, loss), input->n);
}

/* --- Encoder: input [b,n] -> x [b,n,d], p [b,l,d] --- */
/* c is the encoder's config in m's model. */
LI_FN bool li_encoder_defaults(luna_ctx *ctx, li_model_config *m, luna_encoder_config *c, int64_t vocab) {
  if (c->layers == 0) c->layers = 2;
  if (c->positions == LUNA_POSITIONS_DEFAULT) c->positions = LUNA_POSITIONS_SINUSOIDAL;
  if (c->max_length == 0) c->max_length = 512;
  if (c->embedding_scale == LUNA_EMBEDDING_SCALE_DEFAULT) {
    c->embedding_scale = LUNA_EMBEDDING_SCALE_SQRT_DIM;
    if (c->positions == LUNA_POSITIONS_LEARNED) c->embedding_scale = LUNA_EMBEDDING_SCALE_ONE;
  }
  if (!li_is_luna(&c->layer)) c->layer.own_memory = false;
  if (!li_layer_good(ctx, &c->layer, LI_ENCODER_LAYER)) return false;
  m->vocab = vocab;
  m->encoder = *c;
  return true;
}

LI_FN bool li_encoder_init(luna_encoder *e, luna_params *params, const char *prefix, int64_t vocab) {
  const luna_encoder_config *c = &e->config;
  const bool is_luna = li_is_luna(&c->layer), memory = is_luna && !c->layer.own_memory;
  const bool learned = c->positions == LUNA_POSITIONS_LEARNED, normed = c->norm_embedding;
  const int64_t d = c->layer.dim;
  const luna_init init = li_embedding_init(d, c->layer.bert_init);
  const luna_init projection = li_projection_init(c->layer.bert_init, true);
  li_part inputs[LI_MAX_PARTS] = {
    { memory, LI_ALONE(e->memory), "projected_embeddings", c->layer.memory, d, init } };
  const int count = 1 + li_input_parts(&e->input, c->features, d, projection, inputs + 1);
  const li_part parts[] = {
    { !c->features, LI_ALONE(e->embedding), "embed_tokens.weight", vocab, d, init },
    { learned, LI_ALONE(e->positions), "embed_positions.weight", c->first_position + c->max_length, d, init },
    li_norm_part(normed, &e->embedding_norm, "emb_layer_norm.weight", &c->layer),
    li_norm_part(normed && memory, &e->memory_embedding_norm, "proj_emb_layer_norm.weight", &c->layer),
    li_norm_part(c->layer.pre_norm, &e->norm, "layer_norm.weight", &c->layer),
    li_norm_part(c->layer.pre_norm && is_luna, &e->memory_norm, "proj_layer_norm.weight", &c->layer) };
  e->params = e->input.params = params;
  if (!li_parts_init(params, prefix, inputs, count) || !li_parts_init(params, prefix, parts, 4)) return false;
  e->layers = (luna_encoder_layer *)li_layers_init(params, prefix, LI_ENCODER_LAYER, c->tied_layers ? 1 : c->layers,
                                                   &c->layer, c->max_length);
  return e->layers && li_parts_init(params, prefix, parts + 4, 2);
}
LUNA_API luna_status luna_encoder_init(luna_encoder *e, luna_params *params, const char *prefix, int64_t vocab,
                                       const luna_encoder_config *config) {
  li_setup s;
  li_model_config m;
  memset(&m, 0, sizeof m);
  if (config) m.encoder = *config;
  const bool good = li_setup_begin(&s, __func__, params, e, sizeof *e) &&
                    li_encoder_defaults(params->ctx, &m, &m.encoder, vocab ? vocab : 256) &&
                    li_fields_good(params->ctx, LI_OF_ENCODER, &m) &&
                    li_setup_config(&s, &m.encoder, sizeof m.encoder) && li_encoder_init(e, params, prefix, m.vocab);
  return li_setup_end(&s, good);
}

LI_FN float li_embedding_factor(const luna_encoder_config *c) {
  if (c->embedding_scale == LUNA_EMBEDDING_SCALE_SQRT_DIM) return (float)sqrt((double)c->layer.dim);
  return 1.0f;
}

/* Returns s E[token] + position or, without a table, projected features + position, [b,n,d]. Padding becomes 0. */
LI_FN luna_tensor *li_embed(const luna_encoder *e, const luna_input *input) {
  const luna_encoder_config *c = &e->config;
  const luna_norm_layer *norm = &e->embedding_norm;
  const float factor = li_embedding_factor(c);
  luna_scope scope = luna_scope_begin(e->params->ctx);
  luna_tensor *x = li_embedded(e->embedding, &e->input, input);
  if (factor != 1 && e->embedding) x = li_result_so_far(&scope, luna_scale(x, factor));
  x = li_result_so_far(&scope, li_add_positions(x, c->positions, e->positions, c->first_position));
  if (c->keep_padding) x = li_result_so_far(&scope, luna_mask(x, input->lengths));
  if (norm->weight) x = li_result_so_far(&scope, li_normalise(norm, x));
  x = li_result_so_far(&scope, luna_dropout(x, c->layer.dropout));
  return li_result(scope, c->keep_padding ? x : luna_mask(x, input->lengths));
}
LI_FN luna_ctx *li_encoder_ctx(const luna_encoder *e, const luna_input *input, const char *name, const char *what) {
  if (!e) return NULL;
  const li_reader r = li_reader_of(e->params, e->embedding, &e->input, e->positions, e->config.first_position);
  if (li_input_fits(&r, input, name, what)) return r.ctx;
  return NULL;
}

/* Copies the input. Sequences without rows get length 0, so that P has no real slot. Returns false without memory. */
LI_FN bool li_empty_input(luna_ctx *ctx, const char *name, const luna_input *input, luna_input *own) {
  const size_t bytes = (size_t)input->batch * sizeof(int32_t);
  *own = *input;
  if (input->lengths || input->n > 0 || input->batch == 0) return true;
  void *zeros = li_step_host(ctx, name, bytes);
  own->lengths = zeros ? (const int32_t *)memset(zeros, 0, bytes) : NULL;
  return zeros != NULL;
}

LUNA_API luna_tensor *luna_encoder_embed(const luna_encoder *e, const luna_input *input, luna_tensor **p) {
  luna_ctx *ctx = li_encoder_ctx(e, input, __func__, "input");
  if (!ctx) return NULL;
  const luna_scope scope = luna_scope_begin(ctx);
  const luna_encoder_config *c = &e->config;
  const int64_t slots = li_min(c->layer.memory, li_longest(input, li_part_of(ctx).longest));
  const float factor = li_embedding_factor(c);
  luna_tensor *memory = p ? *p : NULL;

  if (e->memory && !memory) {
    memory = luna_slice(e->memory, 0, 0, slots);
    if (factor != 1) memory = luna_scale(memory, factor);
    if (c->positions == LUNA_POSITIONS_SINUSOIDAL)
      memory = luna_add(memory, li_sinusoids(ctx, 0, slots, c->layer.dim));
    memory = luna_expand(li_normalise(&e->memory_embedding_norm, memory), input->batch);
    memory = luna_dropout(luna_as_part(memory), c->layer.dropout);
    if (!c->keep_padding) memory = luna_mask(memory, input->lengths);
    if (!memory) return NULL;
  }

  if (p) *p = memory;
  return li_results(scope, li_embed(e, input), memory);
}

/* p is the incoming memory, or null. *last_x and *last_p become the last layer's results. Either pointer may be null:
   then whatever only its result needs is not computed. */
LI_FN bool li_encoder(const luna_encoder *e, const luna_input *input, luna_tensor *p, luna_tensor **last_x,
                      luna_tensor **last_p) {
  luna_ctx *ctx = li_encoder_ctx(e, input, "luna_encoder_forward", "input");
  luna_input own;
  if (!ctx || !li_empty_input(ctx, "luna_encoder_forward", input, &own)) return false;
  const luna_encoder_config *c = &e->config;
  const bool is_luna = li_is_luna(&c->layer);
  const bool hands_p = is_luna || c->layer.hook;
  luna_scope scope = luna_scope_begin(ctx);
  luna_tensor *x = NULL;
  li_flow f = li_flow_of(NULL, p, own.lengths);
  f.x = luna_encoder_embed(e, &own, &f.p);

  for (int64_t i = 0; i < c->layers; i++) {
    f.wants_x = last_x || i < c->layers - 1;
    f.wants_p = hands_p && (i < c->layers - 1 ? !c->layer.own_memory : last_p != NULL);
    if (!f.x || !li_encoder_layer(&e->layers[c->tied_layers ? 0 : i], &scope, &f)) return false;
    x = f.wants_x ? f.x : NULL;
    p = f.wants_p ? f.p : NULL;
    (void)li_results_so_far(&scope, x, p);
  }

  p = li_normalise(&e->memory_norm, p);
  x = li_normalise(&e->norm, x);
  if (!c->keep_padding) x = luna_mask(x, own.lengths);
  if ((f.wants_x && !x) || (f.wants_p && is_luna && !p)) return false;
  (void)li_results(scope, x, p);
  if (f.wants_p) *last_p = p;
  if (f.wants_x) *last_x = x;
  return true;
}
LUNA_API luna_tensor *luna_encoder_forward(const luna_encoder *e, const luna_input *input, luna_tensor **p) {
  luna_tensor *x = NULL;
  if (!li_encoder(e, input, p ? *p : NULL, &x, p)) return NULL;
  return x;
}

/* --- Classifier: input [b,n] -> logits [b,classes] --- */
LI_FN bool li_pools_memory(luna_pooling pooling) {
  return pooling == LUNA_POOLING_MEMORY || pooling == LUNA_POOLING_MEMORY_BATCH;
}
LI_FN bool li_classifier_defaults(luna_ctx *ctx, li_model_config *m) {
  luna_classifier_config *c = &m->classifier;
  const bool is_luna = li_is_luna(&c->encoder.layer);
  if (c->vocab == 0) c->vocab = 256;
  if (c->classes == 0) c->classes = 2;
  if (c->pooling == LUNA_POOLING_DEFAULT) c->pooling = is_luna ? LUNA_POOLING_MEMORY : LUNA_POOLING_MEAN;
  if (!is_luna && li_pools_memory(c->pooling)) return li_refuse_call(ctx, LUNA_ERROR_POOLING_MEMORY);
  return (!c->per_step || li_is_unused(ctx, "pair", c->pair, "with per_step")) &&
         li_encoder_defaults(ctx, m, &c->encoder, c->vocab);
}
LI_FN bool li_classifier_init(luna_classifier *model, luna_params *params) {
  const luna_classifier_config *c = &model->config;
  const int64_t pooled = c->encoder.layer.dim * (c->pair ? 4 : 1);
  const int64_t features = c->pre_logits ? c->pre_logits : pooled;
  const luna_init init = li_projection_init(c->encoder.layer.bert_init, true);
  const li_part parts[] = {
    { c->pre_logits != 0, LI_BOTH(model->pre_logits), "pre_logits.0.weight", c->pre_logits, pooled, init },
    { true, LI_ALONE(model->projection), "sentence_projection_layer.weight", c->classes, features, init } };
  model->params = params;
  return luna_encoder_init(&model->encoder, params, "encoder.", c->vocab, &c->encoder) == LUNA_OK &&
         li_parts_init(params, "", parts, LI_LENGTH(parts));
}
LI_ENCODER_MODEL_INIT(classifier) /* luna_classifier_init */

/* Averages the first min(lengths[b], n) rows of each sequence: [batch, n, d] -> [batch, d]. No rows give 0. */
LI_FN luna_tensor *li_mean_rows(luna_tensor *x, const int32_t *lengths) {
  if (!x || !lengths) return luna_mean(x, 1);
  luna_tensor *y = luna_sum(luna_mask(x, lengths), 1);
  float *factor = y ? (float *)li_step_host(x->ctx, "luna_classifier_pool", li_bytes(x->shape[0])) : NULL;
  if (!factor) return NULL;
  for (int64_t b = 0; b < x->shape[0]; b++)
    factor[b] = 1.0f / (float)li_max(1, li_min(lengths[b], x->shape[1]));
  const int64_t shape[] = { x->shape[0], 1 };
  return luna_mul(y, luna_tensor_new(x->ctx, factor, 2, shape));
}

LUNA_API luna_tensor *luna_classifier_pool(const luna_classifier *model, luna_tensor *x, luna_tensor *p,
                                           const int32_t *lengths) {
  const bool memory = model && li_pools_memory(model->config.pooling);
  luna_tensor *rows = memory ? p : x;
  if (!li_layer_made(rows ? rows : x, LI_OF(model, projection), __func__)) return NULL;
  if (!rows) return li_fail_null(x->ctx, __func__, "p");
  const int64_t dim = model->config.encoder.layer.dim;
  if (!li_is_sequence(__func__, memory ? "p" : "x", rows, rows->shape[0], dim)) return NULL;

  switch (model->config.pooling) {
    case LUNA_POOLING_CLS:
      if (x->shape[1] < 1) return li_fail(x->ctx, LUNA_ERROR_POOL_EMPTY, x);
      return li_reshape(luna_slice(x, 1, 0, 1), 2, x->shape[0], dim, 1, 1);
    case LUNA_POOLING_MEMORY: return li_mean_rows(p, lengths);
    case LUNA_POOLING_MEMORY_BATCH: return luna_mean(p, 1);
    default: return li_mean_rows(x, lengths);
  }
}
/* Returns the pooled features [b,d], or with per_step each row's [b,n,d]. */
LI_FN luna_tensor *li_classifier_features(const luna_classifier *model, const luna_input *input) {
  const bool memory = li_pools_memory(model->config.pooling) && !model->config.per_step;
  const luna_scope scope = luna_scope_begin(model->params->ctx);
  luna_tensor *x = NULL, *p = NULL;
  luna_input own;
  if (!li_empty_input(scope.ctx, "luna_classifier_forward", input, &own) ||
      !li_encoder(&model->encoder, &own, NULL, memory ? NULL : &x, memory ? &p : NULL)) return NULL;
  if (model->config.per_step) return li_result(scope, x);
  return li_result(scope, luna_classifier_pool(model, x, p, own.lengths));
}
LI_FN luna_tensor *li_classifier_logits(const luna_classifier *model, luna_tensor *features) {
  if (model->pre_logits.weight)
    features = li_linear_activated(features, model->pre_logits.weight, model->pre_logits.bias, LUNA_ACTIVATION_GELU);
  return luna_linear(luna_dropout(features, model->config.encoder.layer.dropout), model->projection, NULL);
}
LUNA_API luna_tensor *luna_classifier_forward(const luna_classifier *model, const luna_input *input) {
  if (!model) return NULL;
  luna_ctx *ctx = li_encoder_ctx(&model->encoder, input, __func__, "input");
  if (!ctx) return NULL;
  if (model->config.pair) return li_fail(ctx, LUNA_ERROR_CLASSIFIER_PAIR);
  return li_classifier_logits(model, li_classifier_features(model, input));
}
LI_FN bool li_is_one_batch(luna_ctx *ctx, const luna_input *first, const luna_input *second, const char *name) {
  return first->batch == second->batch || li_refuse(ctx, LUNA_ERROR_BATCHES_DIFFER, name, first->batch, second->batch);
}
LUNA_API luna_tensor *luna_classifier_forward_pair(const luna_classifier *model, const luna_input *first,
                                                   const luna_input *second) {
  luna_tensor *part[4];
  if (!model) return NULL;
  luna_ctx *ctx = li_encoder_ctx(&model->encoder, first, __func__, "first");
  if (!ctx || !li_encoder_ctx(&model->encoder, second, __func__, "second") ||
      !li_is_one_batch(ctx, first, second, __func__)) return NULL;
  if (!model->config.pair) return li_fail(ctx, LUNA_ERROR_CLASSIFIER_SINGLE);
  part[0] = li_classifier_features(model, first);
  part[1] = li_classifier_features(model, second);
  part[2] = luna_mul(part[0], part[1]);
  part[3] = luna_sub(part[0], part[1]);
  return li_classifier_logits(model, luna_concat(part, 4, 1));
}

LI_FN bool li_masked_lm_defaults(luna_ctx *ctx, li_model_config *m) {
  luna_masked_lm_config *c = &m->masked_lm;
  if (c->vocab == 0) c->vocab = 257;
  return li_encoder_defaults(ctx, m, &c->encoder, c->vocab);
}
LI_FN bool li_masked_lm_init(luna_masked_lm *model, luna_params *params) {
  const luna_masked_lm_config *c = &model->config;
  const luna_layer_config *layer = &c->encoder.layer;
  const luna_init projection = li_projection_init(layer->bert_init, true);
  const luna_init embedding = li_embedding_init(layer->dim, layer->bert_init);
  const li_part parts[] = {
    { true, LI_BOTH(model->dense), "lm_head.dense.weight", layer->dim, layer->dim, projection },
    li_norm_part(true, &model->norm, "lm_head.layer_norm.weight", layer),
    { true, LI_ALONE(model->bias), "lm_head.bias", c->vocab, LI_VECTOR, li_init(LUNA_INIT_ZEROS, 0) },
    { c->encoder.features != 0, LI_ALONE(model->output), "lm_head.weight", c->vocab, layer->dim, embedding } };
  model->params = params;
  if (luna_encoder_init(&model->encoder, params, "encoder.", c->vocab, &c->encoder) != LUNA_OK) return false;
  model->output = model->encoder.embedding;
  return li_parts_init(params, "", parts, LI_LENGTH(parts));
}
LI_ENCODER_MODEL_INIT(masked_lm) /* luna_masked_lm_init */
LI_FN luna_tensor *li_masked_lm_head(const luna_masked_lm *model, luna_tensor *x) {
  x = li_linear_activated(x, model->dense.weight, model->dense.bias, LUNA_ACTIVATION_GELU);
  return li_normalise(&model->norm, x);
}
LUNA_API luna_tensor *luna_masked_lm_forward(const luna_masked_lm *model, const luna_input *input) {
  if (!model || !li_encoder_ctx(&model->encoder, input, __func__, "input")) return NULL;
  luna_tensor *x = luna_encoder_forward(&model->encoder, input, NULL);
  if (!x) return NULL;
  return luna_linear(li_masked_lm_head(model, x), model->output, model->bias);
}

LUNA_API luna_tensor *luna_masked_lm_loss(const luna_masked_lm *model, const luna_input *input, const int32_t *labels) {
  if (!model || !li_encoder_ctx(&model->encoder, input, __func__, "input")) return NULL;
  luna_tensor *x = luna_encoder_forward(&model->encoder, input, NULL);
  if (!x) return NULL;
  luna_ctx *ctx = x->ctx;
  const int64_t all = input->batch * input->n, classes = model->config.vocab;
  int64_t count = 0;
  if (!labels && all > 0) return li_fail_null(ctx, __func__, "labels");

  for (int64_t i = 0; i < all; i++) {
    const int32_t label = li_label(input, labels, i);
    if (label >= classes) return li_fail(ctx, LUNA_ERROR_LABEL_RANGE, __func__, i, (int64_t)label, classes);
    count += label >= 0;
  }

  /* The head and the loss only compute rows that have a label. */
  int32_t *places = (int32_t *)li_step_host(ctx, __func__, (size_t)(2 * count) * sizeof(int32_t));
  if (!places) return NULL;
  int32_t *chosen = places + count;

  for (int64_t i = 0, k = 0; i < all; i++) {
    if (li_label(input, labels, i) < 0) continue;
    places[k] = (int32_t)i;
    chosen[k++] = labels[i];
  }

  x = luna_embedding(li_reshape(x, 2, all, model->config.encoder.layer.dim, 1, 1), places, 1, count);
  x = li_masked_lm_head(model, x);
  return li_linear_cross_entropy_loss(__func__, x, model->output, model->bias, chosen, NULL);
}

LI_FN bool li_seq2seq_defaults(luna_ctx *ctx, li_model_config *m) {
  luna_seq2seq_config *c = &m->seq2seq;
  if (c->vocab == 0) c->vocab = 256;
  if (c->target_vocab == 0) c->target_vocab = c->vocab;
  if (c->encoder.embedding_scale == LUNA_EMBEDDING_SCALE_DEFAULT)
    c->encoder.embedding_scale = LUNA_EMBEDDING_SCALE_SQRT_DIM;
  if (!li_is_luna(&c->encoder.layer) || c->encoder.layer.own_memory)
    return li_is_luna_only(ctx, "an encoder-decoder");
  if (c->share_embeddings && c->vocab != c->target_vocab)
    return li_refuse_call(ctx, LUNA_ERROR_SHARED_VOCAB, ctx->call, c->vocab, c->target_vocab);
  if (!li_encoder_defaults(ctx, m, &c->encoder, c->vocab) ||
      (c->encoder.features && !li_is_unused(ctx, "share_embeddings", c->share_embeddings, "with features")))
    return false;
  if (c->decoder_layers == 0) c->decoder_layers = c->encoder.layers;
  if (c->max_target_length == 0) c->max_target_length = c->encoder.max_length;
  return true;
}

LI_FN bool li_seq2seq_init(luna_seq2seq *model, luna_params *params) {
  const luna_seq2seq_config *c = &model->config;
  const luna_layer_config *layer = &c->encoder.layer;
  const int64_t d = layer->dim, places = c->encoder.first_position + c->max_target_length;
  const luna_init init = li_embedding_init(d, layer->bert_init);
  const bool learned = c->encoder.positions == LUNA_POSITIONS_LEARNED;
  const li_part parts[] = {
    { !c->share_embeddings, LI_ALONE(model->embedding), "embed_tokens.weight", c->target_vocab, d, init },
    { learned, LI_ALONE(model->positions), "embed_positions.weight", places, d, init },
    li_norm_part(layer->pre_norm, &model->norm, "layer_norm.weight", layer),
    li_norm_part(layer->pre_norm, &model->memory_norm, "proj_layer_norm.weight", layer),
    { c->separate_output, LI_ALONE(model->output), "output_projection.weight", c->target_vocab, d, init } };
  model->params = params;
  if (luna_encoder_init(&model->encoder, params, "encoder.", c->vocab, &c->encoder) != LUNA_OK) return false;
  model->embedding = model->encoder.embedding;
  if (!li_parts_init(params, "decoder.", parts, 2)) return false;
  model->output = model->embedding;
  model->layers = (luna_decoder_layer *)li_layers_init(params, "decoder.", LI_DECODER_LAYER, c->decoder_layers, layer,
                                                       c->max_target_length);
  return model->layers && li_parts_init(params, "decoder.", parts + 2, LI_LENGTH(parts) - 2);
}

LI_ENCODER_MODEL_INIT(seq2seq) /* luna_seq2seq_init */

/* Encodes the source, then decodes the target: returns the features of its logits, [b,n,d]. */
LI_FN luna_tensor *li_seq2seq_features(const luna_seq2seq *model, const luna_input *source, const luna_input *target,
                                       const char *name) {
  luna_ctx *ctx = li_encoder_ctx(&model->encoder, source, name, "source");
  if (!ctx) return NULL;
  const li_reader to = li_reader_of(model->params, model->embedding, NULL, model->positions,
                                    model->config.encoder.first_position);
  luna_tensor *p = NULL;
  luna_encoder e; /* Embeds the target */
  luna_input from;
  if (!li_input_fits(&to, target, name, "target") || !li_is_one_batch(ctx, source, target, name) ||
      !li_empty_input(ctx, name, source, &from)) return NULL;
  const luna_scope scope = luna_scope_begin(ctx);
  luna_tensor *context = luna_encoder_forward(&model->encoder, &from, &p);
  memset(&e, 0, sizeof e);
  e.config = model->config.encoder;
  e.config.keep_padding = true; /* Padding of the target only gets a zero embedding. */
  e.params = model->params;
  e.embedding = model->embedding;
  e.positions = model->positions;
  luna_tensor *x = context ? li_embed(&e, target) : NULL;
  luna_scope inner = luna_scope_begin(ctx); /* Keeps the encoder's results */
  li_flow f = li_flow_of(x, p, from.lengths);
  f.context = context;
  f.horizon = li_params_horizon(model->params, li_longest(target, li_part_of(ctx).target_longest));

  for (int64_t i = 0; i < model->config.decoder_layers && x; i++) {
    f.wants_p = i < model->config.decoder_layers - 1;
    x = li_decoder_layer(&model->layers[i], &f);
    f.x = x = li_results_so_far(&inner, x, f.p);
  }

  return li_result(scope, li_normalise(&model->norm, x));
}
LUNA_API luna_tensor *luna_seq2seq_forward(const luna_seq2seq *model, const luna_input *source,
                                           const luna_input *target) {
  if (!model) return NULL;
  const luna_scope scope = luna_scope_begin(li_ctx_of(model->params));
  luna_tensor *x = li_seq2seq_features(model, source, target, __func__);
  if (!x) return NULL;
  return li_result(scope, luna_linear(x, model->output, NULL));
}
LUNA_API luna_tensor *luna_seq2seq_loss(const luna_seq2seq *model, const luna_input *source, const luna_input *target,
                                        const int32_t *labels, const luna_cross_entropy_config *config) {
  if (!model) return NULL;
  const luna_scope scope = luna_scope_begin(li_ctx_of(model->params));
  luna_tensor *x = li_seq2seq_features(model, source, target, __func__);
  if (!x) return NULL;
  luna_tensor *const in[3] = { x, model->output, NULL };
  return li_result(scope, li_labels_loss(__func__, in, target, labels, config));
}
/* ----------------
   >>impl_trainer: schedules and optimisers. An optimiser (luna_optimizer) keeps an li_trained for each parameter. It
   hands parameters with a gradient to the backend as a table of luna_update. In order: schedules, new parameters,
   opening, groups, a step, averages, clipping. A new rule is a luna_optimizer_hook. Guarded by tests/engine/trainer.c
   and optimizer_hook.c.
   ---------------- */
#ifndef LUNA_NO_TRAIN
LUNA_API float luna_schedule_at(const luna_schedule *s, int64_t step) {
  if (!s) return 1;
  const double t = (double)step, warmup = (double)s->warmup, total = (double)s->total, floor = (double)s->floor;
  const double from = (double)s->warmup_from, gamma = s->gamma == 0 ? 0.1 : (double)s->gamma;
  if (step < s->warmup) return (float)(from + (1 - from) * t / warmup);
  const double done = t < total && total > warmup ? (t - warmup) / (total - warmup) : 1;
  double factor = 1;
  if (s->decay == LUNA_DECAY_INVERSE_SQRT) {
    const double first = warmup > 1 ? warmup : 1;
    factor = sqrt(first / (t > 1 ? t : 1));
  }
  if (s->decay == LUNA_DECAY_LINEAR) factor = 1 - done * (1 - floor);
  if (s->decay == LUNA_DECAY_COSINE) factor = floor + (1 - floor) * 0.5 * (1 + cos(3.14159265358979323846 * done));
  if (s->decay == LUNA_DECAY_MILESTONES) {
    for (int i = 0; i < 4 && s->milestone[i] > 0; i++)
      if (step > s->milestone[i]) factor *= gamma;
  }
  if (factor > floor) return (float)factor;
  return (float)floor;
}

typedef struct li_trained {
  luna_tensor *tensor;
  const char *name;
  float *moment[4]; /* Moments, then the average */
  float lr, decay;
  bool reached; /* By an update, so its average has begun. */
} li_trained;
typedef struct li_group { luna_param_group group; struct li_group *next; } li_group;
struct luna_optimizer {
  luna_ctx *ctx;
  luna_params *params;
  luna_optimizer_kind kind;
  const luna_optimizer_hook *hook; /* LUNA_OPTIMIZER_HOOK's, else null */
  luna_optimizer_config config;
  int moments, kept;          /* Per parameter; plus average */
  int64_t attempts, size, reached;
  li_trained *trained;        /* [size] */
  luna_update *parts, *table; /* [reached]; in backend memory */
  li_group *groups;           /* In order of addition */
  luna_step_state *state;     /* In backend memory */
  uint64_t backwards;         /* At the last step */
  uint64_t skipped_in_row;    /* As the host knows */
  bool swapped;               /* Parameters and averages have changed places. */
  luna_optimizer *next;       /* The context's */
};
/* Ends a failed backward. It clears all gradients, so that no gradient is partial and no optimiser steps. */
LI_FN void li_gradients_forget(luna_ctx *ctx) {
  for (const luna_params *set = ctx->newest; set; set = set->older)
    (void)luna_params_zero_grad((luna_params *)(uintptr_t)set);
  for (luna_optimizer *o = ctx->optimizers; o; o = o->next) o->backwards = ctx->backwards;
}

LI_FN bool li_group_fits(const luna_param_group *group, const li_trained *t) {
  return (!group->name || strstr(t->name, group->name)) && (group->max_rank <= 0 || t->tensor->rank <= group->max_rank);
}
LI_FN float li_group_factor(float factor) {
  if (factor == 0) return 1;
  if (factor < 0) return 0.0f;
  return factor;
}

/* Sets a parameter's rates by the config and the last group that matches it. */
LI_FN void li_rates_set(const luna_optimizer *o, li_trained *t) {
  t->lr = 1;
  t->decay = o->config.weight_decay;
  for (const li_group *at = o->groups; at; at = at->next) {
    if (!li_group_fits(&at->group, t)) continue;
    t->lr = li_group_factor(at->group.lr_factor);
    t->decay = o->config.weight_decay * li_group_factor(at->group.decay_factor);
  }
}

/* Adds the set's parameters from index `size` on, with zero moments: all of them, or none if memory is out. */
LI_FN luna_status li_optimizer_join(luna_optimizer *o, const char *name) {
  luna_ctx *ctx = o->ctx;
  const int64_t size = o->params->size;
  const li_persist_mark mark = li_persistent(ctx);
  void *trained, *parts, *table = NULL, *moment;
  if (o->trained && o->size >= size) return LUNA_OK;
  bool good = li_persist(ctx, (size_t)size * sizeof(li_trained), false, &trained) &&
              li_persist(ctx, (size_t)size * sizeof(luna_update), false, &parts) &&
              (!ctx->backend->allocate || li_persist(ctx, (size_t)size * sizeof(luna_update), true, &table));
  if (good && o->size) memcpy(trained, o->trained, (size_t)o->size * sizeof(li_trained));

  for (int64_t k = o->size; k < size && good; k++) {
    li_param *p = o->params->names.at[k];
    li_trained *t = (li_trained *)trained + k;
    t->tensor = &p->tensor;
    t->name = p->name;
    t->reached = false;
    li_rates_set(o, t);
    for (int i = 0; i < o->kept && good; i++) {
      good = li_persist(ctx, li_bytes(luna_count(t->tensor)), true, &moment);
      t->moment[i] = (float *)moment;
    }
  }

  if (!good) {
    li_persist_rewind(ctx, mark);
    return li_fail_memory(ctx, name, li_bytes(luna_params_element_count(o->params)));
  }
  o->trained = (li_trained *)trained;
  o->parts = (luna_update *)parts;
  o->table = (luna_update *)(table ? table : parts);
  o->reached = 0;
  o->size = size;
  return LUNA_OK;
}

LI_FN bool li_optimizer_hook_good(luna_ctx *ctx, const char *name, const luna_optimizer_hook *hook) {
  const luna_backend *backend = ctx->backend;
  if (!li_is_given(ctx, name, "hook", hook != NULL) ||
      !li_is_given(ctx, name, "hook->name or hook->update", hook->name && hook->update) ||
      !li_in(ctx, name, "the length of hook->name", (int64_t)strlen(hook->name), 1, LI_HOOK_NAME - 1) ||
      !li_in(ctx, name, "hook->moments", hook->moments, 0, 3) ||
      !li_is_rate(ctx, name, "hook->largest", hook->largest)) return false;
  if (!li_on_device(ctx) || (backend->knows && backend->knows(hook))) return true;
  return li_refuse_call(ctx, LUNA_ERROR_HOOK_CPU_ONLY, name, hook->name);
}

LI_FN bool li_optimizer_good(luna_ctx *ctx, const luna_optimizer *o, const char *name) {
  const luna_optimizer_config *c = &o->config;
  const luna_schedule *s = &c->schedule;
  const bool total = s->decay == LUNA_DECAY_LINEAR || s->decay == LUNA_DECAY_COSINE;
  if (o->kind == LUNA_OPTIMIZER_HOOK && !li_optimizer_hook_good(ctx, name, o->hook)) return false;
  if (!li_is_rate(ctx, name, "lr", c->lr) || !li_is_rate(ctx, name, "weight_decay", c->weight_decay) ||
      !li_is_rate(ctx, name, "epsilon", c->epsilon) || !li_is_probability(ctx, name, "momentum", c->momentum) ||
      !(c->clip >= 0 || li_is_rate(ctx, name, "clip", c->clip))) return false;
  if (c->nesterov && c->momentum == 0) return li_refuse_call(ctx, LUNA_ERROR_NESTEROV, name);
  return li_is_probability(ctx, name, "beta1", c->beta1) && li_is_probability(ctx, name, "beta2", c->beta2) &&
         li_is_probability(ctx, name, "average", c->average) &&
         li_is_rate(ctx, name, "schedule.floor", s->floor) && li_is_rate(ctx, name, "schedule.gamma", s->gamma) &&
         li_is_rate(ctx, name, "schedule.warmup_from", s->warmup_from) &&
         li_in(ctx, name, "schedule.decay", (int64_t)s->decay, 0, LUNA_DECAY_MILESTONES) &&
         (!total || s->total > 0 || li_refuse_call(ctx, LUNA_ERROR_SCHEDULE_TOTAL, name, s->total));
}

/* Defaults by luna_optimizer_kind. SGD has moments only with momentum. Settings that an optimiser lacks are 0. */
typedef struct li_optimizer_defaults {
  const char *name;
  int moments;
  float lr, beta1, beta2, epsilon;
} li_optimizer_defaults;
static const li_optimizer_defaults li_optimizers[] = {
  { "luna_sgd", 1, 0.01f, 0, 0, 0 }, { "luna_adam", 2, 1e-3f, 0.9f, 0.999f, 1e-8f },
  { "luna_adamw", 2, 1e-3f, 0.9f, 0.999f, 1e-8f }, { "luna_optimizer_open", 0, 1e-3f, 0, 0, 0 } };
LI_FN void li_optimizer_default(luna_optimizer *o) {
  luna_optimizer_config *c = &o->config;
  const li_optimizer_defaults *d = &li_optimizers[o->kind];
  const bool sgd = o->kind == LUNA_OPTIMIZER_SGD;
  if (c->lr == 0) c->lr = d->lr;
  o->moments = o->hook ? o->hook->moments : d->moments;
  if (sgd && c->momentum == 0) o->moments = 0;
  o->kept = o->moments + (c->average > 0);
  if (o->hook) return;
  if (c->beta1 == 0 || d->beta1 == 0) c->beta1 = d->beta1;
  if (c->beta2 == 0 || d->beta2 == 0) c->beta2 = d->beta2;
  if (c->epsilon == 0 || d->epsilon == 0) c->epsilon = d->epsilon;
  if (!sgd) c->momentum = 0;
  if (!sgd) c->nesterov = false;
}

LI_FN luna_optimizer *li_optimizer_open(luna_params *params, luna_optimizer_kind kind, const luna_optimizer_hook *hook,
                                        const luna_optimizer_config *config) {
  const char *name = li_optimizers[kind].name;
  luna_ctx *ctx = li_ctx_of(params);
  luna_optimizer like, *o = NULL;
  void *memory, *state;
  if (!ctx) return NULL;
  memset(&like, 0, sizeof like);
  like.kind = kind;
  like.hook = hook;
  like.ctx = ctx;
  like.params = params;
  if (config) like.config = *config;
  li_optimizer_default(&like);
  const li_persist_mark mark = li_persistent(ctx);
  luna_status status = ctx->open_status;
  if (params->shared) status = li_fail_status(ctx, LUNA_ERROR_SET_BORROWED, name);
  if (status == LUNA_OK && !li_optimizer_good(ctx, &like, name)) status = ctx->last_status;
  if (status == LUNA_OK && (!li_persist(ctx, sizeof(luna_optimizer), false, &memory) ||
                            !li_persist(ctx, sizeof(luna_step_state), !ctx->options.measure, &state)))
    status = li_fail_memory(ctx, name, sizeof(luna_optimizer));

  if (status == LUNA_OK) {
    o = (luna_optimizer *)memory;
    *o = like;
    o->state = (luna_step_state *)state;
    status = li_optimizer_join(o, name);
  }

  li_remember(ctx, status);
  if (status != LUNA_OK) {
    li_persist_rewind(ctx, mark);
    return NULL;
  }
  o->next = ctx->optimizers;
  return ctx->optimizers = o;
}
LUNA_API luna_optimizer *luna_sgd(luna_params *params, const luna_optimizer_config *config) {
  return li_optimizer_open(params, LUNA_OPTIMIZER_SGD, NULL, config);
}
LUNA_API luna_optimizer *luna_adam(luna_params *params, const luna_optimizer_config *config) {
  return li_optimizer_open(params, LUNA_OPTIMIZER_ADAM, NULL, config);
}
LUNA_API luna_optimizer *luna_adamw(luna_params *params, const luna_optimizer_config *config) {
  return li_optimizer_open(params, LUNA_OPTIMIZER_ADAMW, NULL, config);
}
LUNA_API luna_optimizer *luna_optimizer_open(luna_params *params, const luna_optimizer_hook *hook,
                                             const luna_optimizer_config *config) {
  return li_optimizer_open(params, LUNA_OPTIMIZER_HOOK, hook, config);
}

/* Makes a group the optimiser's last, and replaces one for the same parameters. Returns false if memory is out. */
LI_FN bool li_group_keep(luna_optimizer *o, const luna_param_group *group) {
  const char *name = group->name ? group->name : ""; /* Every name contains "". */
  const size_t size = strlen(name) + 1;
  li_group **at = &o->groups;
  while (*at && ((*at)->group.max_rank != group->max_rank || strcmp((*at)->group.name, name) != 0)) at = &(*at)->next;
  li_group *kept = *at;
  if (kept) {
    *at = kept->next;
    name = kept->group.name;
  } else {
    kept = (li_group *)li_persist_host(o->ctx, "luna_optimizer_add_group", sizeof *kept + size);
    if (!kept) return false;
    name = (char *)memcpy(kept + 1, name, size);
  }

  kept->group = *group;
  kept->group.name = name;
  kept->next = NULL;
  while (*at) at = &(*at)->next;
  *at = kept;
  return true;
}
LUNA_API luna_status luna_optimizer_add_group(luna_optimizer *o, const luna_param_group *group) {
  luna_ctx *ctx = o ? o->ctx : NULL;
  int64_t matched = 0;
  if (!o) return LUNA_BAD_ARGUMENT;
  if (!li_is_given(ctx, __func__, "group", group != NULL) ||
      !li_is_number(ctx, __func__, "lr_factor", group->lr_factor) ||
      !li_is_number(ctx, __func__, "decay_factor", group->decay_factor)) return ctx->last_status;
  const luna_status status = li_optimizer_join(o, __func__);
  if (status != LUNA_OK) return status;
  for (int64_t i = 0; i < o->size; i++) matched += li_group_fits(group, &o->trained[i]);
  if (!matched)
    return li_fail_status(ctx, LUNA_ERROR_GROUP_EMPTY, group->name ? group->name : "", (int64_t)group->max_rank);
  if (!li_group_keep(o, group)) return ctx->last_status;
  for (int64_t i = 0; i < o->size; i++) li_rates_set(o, &o->trained[i]);
  return LUNA_OK;
}

/* Adds parameters made since the last step. A failed call stops an optimiser, but another optimiser's LUNA_NOT_FINITE
   does not. */
LI_FN luna_status li_optimizer_ready(luna_optimizer *o) {
  if (!o) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = o->ctx;
  if (o->swapped) return li_fail_status(ctx, LUNA_ERROR_AVERAGE_SWAPPED, "luna_optimizer_step");
  if (ctx->status != LUNA_OK && ctx->status != LUNA_NOT_FINITE) return ctx->status;
  return li_optimizer_join(o, "luna_optimizer_step");
}
LI_FN void li_look_at_optimizers(luna_ctx *ctx, bool skipped) {
  for (luna_optimizer *o = ctx->optimizers; o; o = o->next)
    if (skipped || o->skipped_in_row > 0) o->skipped_in_row = li_state_of(ctx, o->state).skipped_in_row;
}

LI_FN float li_scheduled_lr(const luna_optimizer *o, int64_t attempt) {
  const bool from_zero = o->hook && o->hook->from_zero;
  return o->config.lr * luna_schedule_at(&o->config.schedule, from_zero ? attempt : attempt + 1);
}

/* Returns the first parameter whose rates are too large, or null. If null, no update by a gradient of at most
   luna_rule.largest makes a parameter or a moment Inf. */
LI_FN const li_trained *li_rates_too_large(const luna_optimizer *o, float lr) {
  for (int64_t i = 0; i < o->size; i++) {
    const li_trained *t = &o->trained[i];
    if (!(lr * t->lr <= 1e9f && t->decay <= 1e6f && lr * t->lr * t->decay <= 2)) return t;
  }
  return NULL;
}
LUNA_API luna_status luna_optimizer_advance(luna_optimizer *o) {
  luna_status status = li_optimizer_ready(o);
  if (status != LUNA_OK || o->ctx->options.measure) return status;
  luna_ctx *ctx = o->ctx;
  ctx->unread = true; /* A replayed graph does not call luna_optimizer_apply. */
  const float lr = li_scheduled_lr(o, o->attempts);
  const li_trained *large = li_rates_too_large(o, lr);
  if (large)
    return li_fail_status(ctx, LUNA_ERROR_RATES, (double)(lr * large->lr), (double)large->decay, large->name);
  o->attempts++;
  status = ctx->backend->copy(ctx, &o->state->lr, &lr, sizeof lr, 1);
  return li_backend_result(ctx, __func__, status);
}

/* Until an update reaches a parameter, its average is its value. */
LI_FN luna_status li_average_begin(const luna_optimizer *o, const li_trained *t) {
  luna_ctx *ctx = o->ctx;
  if (o->kept == o->moments || t->reached || ctx->options.measure) return LUNA_OK;
  return ctx->backend->copy(ctx, t->moment[o->moments], t->tensor->data, li_bytes(luna_count(t->tensor)), 0);
}

/* Lists the parameters that have a gradient, and copies changes of the list to the device. */
LI_FN luna_status li_optimizer_parts(luna_optimizer *o) {
  luna_ctx *ctx = o->ctx;
  int64_t reached = 0, first = 0;
  bool changed = false;
  luna_status status = LUNA_OK;

  for (int64_t i = 0; i < o->size && status == LUNA_OK; i++) {
    li_trained *t = &o->trained[i];
    luna_update part;
    if (!t->tensor->grad) continue;
    status = li_average_begin(o, t);
    t->reached = true;
    memset(&part, 0, sizeof part);
    part.value = t->tensor->data;
    part.grad = t->tensor->grad;
    memcpy(part.moment, t->moment, (size_t)o->moments * sizeof *part.moment);
    part.average = o->kept > o->moments ? t->moment[o->moments] : NULL;
    part.count = luna_count(t->tensor);
    part.first = first;
    part.decay = t->decay;
    part.lr = t->lr;
    first += li_divide_up(part.count, LUNA_UPDATE_PIECE);
    changed = changed || reached >= o->reached || memcmp(&o->parts[reached], &part, sizeof part) != 0;
    memcpy(&o->parts[reached++], &part, sizeof part);
  }

  o->reached = reached;
  if (!changed || o->table == o->parts || status != LUNA_OK) return status;
  return ctx->backend->copy(ctx, o->table, o->parts, (size_t)reached * sizeof *o->parts, 1);
}

LI_FN luna_status li_optimizer_call(luna_optimizer *o, const luna_rule *rule, bool update) {
  luna_ctx *ctx = o->ctx;
  luna_status (*const call)(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table,
                            int64_t count) = update ? ctx->backend->update : ctx->backend->norm;
  if (!ctx->trace) return call(ctx, rule, o->parts, o->table, o->reached);

  luna_trace_event e = li_trace_start(ctx, LUNA_TRACE_OPTIMIZER, update ? "optimizer update" : "optimizer norm", NULL);
  /* The norm reads gradients. The update reads and writes gradients, values, moments; an average adds three passes. */
  const int passes = update ? 4 + 2 * o->moments + 3 * (o->kept - o->moments) : 1;
  for (int64_t i = 0; i < o->reached; i++) e.bytes += (double)o->parts[i].count * (double)sizeof(float) * passes;
  const luna_status status = call(ctx, rule, o->parts, o->table, o->reached);
  li_trace_send(ctx, e);
  return status;
}

LUNA_API luna_status luna_optimizer_apply(luna_optimizer *o) {
  luna_status status = li_optimizer_ready(o);
  if (status != LUNA_OK) return status;
  luna_ctx *ctx = o->ctx;
  const luna_optimizer_config *c = &o->config;
  o->backwards = ctx->backwards;
  ctx->writes++;
  if (ctx->options.measure) return LUNA_OK;
  float largest = 1e18f; /* Adam squares gradients. */
  if (o->hook && o->hook->largest > 0) largest = o->hook->largest;
  const luna_rule rule = { o->kind, c->nesterov, c->momentum, c->beta1, c->beta2, c->epsilon, c->clip, c->average,
                           largest, o->state, o->hook, c };
  status = li_optimizer_parts(o);
  if (status == LUNA_OK) status = li_optimizer_call(o, &rule, false);
  if (status == LUNA_OK) status = li_optimizer_call(o, &rule, true);
  ctx->stepped = ctx->unread = true;
  if (status != LUNA_OK) return li_backend_result(ctx, "luna_optimizer_step", status);
  if (!li_on_device(ctx)) o->skipped_in_row = o->state->skipped_in_row;
  const int64_t max_skips = c->max_skips == 0 ? 10 : c->max_skips;
  if (max_skips < 0 || o->skipped_in_row < (uint64_t)max_skips) return LUNA_OK;
  return li_fail_status(ctx, LUNA_ERROR_SKIPPED_STEPS, (int64_t)o->skipped_in_row, o->attempts);
}
LUNA_API luna_status luna_optimizer_step(luna_optimizer *o) {
  luna_status status = li_optimizer_ready(o);
  if (status == LUNA_OK && o->backwards == o->ctx->backwards)
    return li_fail_status(o->ctx, LUNA_ERROR_NO_BACKWARD);
  if (status == LUNA_OK) status = luna_optimizer_advance(o);
  if (status == LUNA_OK) return luna_optimizer_apply(o);
  return status;
}

LUNA_API luna_status luna_optimizer_swap_average(luna_optimizer *o) {
  luna_ctx *ctx = o ? o->ctx : NULL;
  void *scratch;
  if (!o) return LUNA_BAD_ARGUMENT;
  if (o->kept == o->moments) return li_fail_status(ctx, LUNA_ERROR_AVERAGE_NONE);
  const li_mark mark = li_step_mark(ctx);
  const size_t room = LUNA_UPDATE_PIECE * sizeof(float);
  if (!li_step(ctx, room, true, &scratch)) return li_fail_memory(ctx, __func__, room);
  luna_status status = ctx->open_status;
  ctx->writes++;

  for (const li_trained *t = o->trained; t < o->trained + o->size; t++) {
    if (!t->reached) continue;
    for (int64_t at = 0; at < luna_count(t->tensor) && status == LUNA_OK; at += LUNA_UPDATE_PIECE) {
      const size_t bytes = li_bytes(li_min(luna_count(t->tensor) - at, LUNA_UPDATE_PIECE));
      /* Each place gets the next one's values. */
      void *const moves[] = { scratch, t->tensor->data + at, t->moment[o->moments] + at, scratch };
      for (int i = 0; i < 3 && status == LUNA_OK; i++)
        status = ctx->backend->copy(ctx, moves[i], moves[i + 1], bytes, 0);
    }
  }

  li_step_rewind(ctx, mark);
  if (status == LUNA_OK) o->swapped = !o->swapped;
  return li_backend_result(ctx, __func__, status);
}

LUNA_API luna_status luna_optimizer_set_lr(luna_optimizer *o, float lr) {
  if (!o) return LUNA_BAD_ARGUMENT;
  if (!li_is_rate(o->ctx, __func__, "lr", lr)) return o->ctx->last_status;
  o->config.lr = lr;
  return LUNA_OK;
}
LUNA_API float luna_optimizer_lr(const luna_optimizer *o) {
  if (o) return li_scheduled_lr(o, li_max(o->attempts, 1) - 1);
  return 0;
}
LI_FN luna_step_state li_optimizer_state(const luna_optimizer *o) {
  luna_step_state none;
  memset(&none, 0, sizeof none);
  if (o) return li_state_of(o->ctx, o->state);
  return none;
}
LUNA_API int64_t luna_optimizer_steps(const luna_optimizer *o) { return (int64_t)li_optimizer_state(o).updates; }
LUNA_API int64_t luna_optimizer_skipped(const luna_optimizer *o) { return (int64_t)li_optimizer_state(o).skipped; }
LUNA_API float luna_optimizer_grad_norm(const luna_optimizer *o) { return li_optimizer_state(o).norm; }
#else
LI_FN void li_look_at_optimizers(luna_ctx *ctx, bool skipped) { (void)ctx, (void)skipped; }
#endif /* !LUNA_NO_TRAIN */

/* ----------------
   >>impl_checkpoints: parameter sets to and from safetensors. A save has an li_st_contents, which puts text pairs and
   tensors. It runs three times: to count the header, to write the header, and to write the data. A load has an
   li_loader, which gets the open file: li_load, li_load_matching, li_load_kind, li_load_training, li_inspect. Then come
   files by path, and the public calls. New file content needs a contents and a loader. Guarded by
   tests/files/checkpoints.c, tests/files/model_files.c and tests/files/resume.c.
   ---------------- */
/* Writes through a callback, which takes `size` bytes or returns false. The first failure sticks. */
typedef struct li_st_writer {
  bool (*write)(void *user, const void *bytes, size_t size); /* Null: only counts */
  void *user;
  luna_ctx *device;                /* Null: host tensors */
  uint64_t written;
  bool failed;
  const char *pair, *tensor, *end; /* They precede the header's next pair and tensor; null: data. */
  int64_t begin;                   /* Next tensor's data offset */
} li_st_writer;

LI_FN void li_st_write_bytes(li_st_writer *w, const void *bytes, size_t size) {
  if (w->failed || size == 0) return;
  w->failed = w->write && !w->write(w->user, bytes, size);
  if (!w->failed) w->written += size;
}

LI_FN void li_st_write_text(li_st_writer *w, const char *text) { li_st_write_bytes(w, text, strlen(text)); }

LI_FN void li_st_write_little(li_st_writer *w, uint64_t value, int size) {
  uint8_t bytes[8];
  for (int i = 0; i < size; i++) bytes[i] = (uint8_t)(value >> 8 * i);
  li_st_write_bytes(w, bytes, (size_t)size);
}

/* Writes a string as JSON. Invalid UTF-8 fails, as it could not be read back. */
LI_FN void li_st_write_string(li_st_writer *w, const char *string) {
  const char *at = string, *end = string + strlen(string), *start = string;
  char escape[6] = {'\\', 'u', '0', '0', '0', '0'};
  li_st_write_text(w, "\"");
  while (at < end) {
    const char *character = at;
    const uint32_t code = li_st_utf8(&at, end);
    if (code == LI_ST_BAD) w->failed = true;
    if (w->failed) return;
    if (code >= 0x20 && code != '"' && code != '\\') continue;
    li_st_write_bytes(w, start, (size_t)(character - start));
    escape[4] = li_hex_digits[code >> 4 & 15];
    escape[5] = li_hex_digits[code & 15];
    if (code < 0x20) li_st_write_bytes(w, escape, 6);
    else li_st_write_text(w, code == '"' ? "\\\"" : "\\\\");
    start = at;
  }

  li_st_write_bytes(w, start, (size_t)(end - start));
  li_st_write_text(w, "\"");
}

LI_FN void li_st_put_pair(li_st_writer *w, const char *key, const char *value) {
  if (!w->pair) return;
  li_st_write_text(w, w->pair);
  li_st_write_string(w, key);
  li_st_write_text(w, ":");
  li_st_write_string(w, value);
  w->pair = ",", w->tensor = "},", w->end = "}}";
}
/* Writes a tensor's entry in the header. Returns false if the data is being written. */
LI_FN bool li_st_put_entry(li_st_writer *w, const char *name, const char *dtype, const luna_tensor *like, int size) {
  const int64_t count = li_shape_count(like->rank, like->shape), begin = w->begin;
  char entry[240];
  if (count < 0 || strcmp(name, "__metadata__") == 0) w->failed = true;
  if (w->failed || !w->tensor) return w->failed;
  w->begin += size * count;
  li_print(entry, sizeof entry, ":{\"dtype\":\"%s\",\"shape\":%t,\"data_offsets\":[%d,%d]}", dtype, like, begin,
           w->begin);
  li_st_write_text(w, w->tensor);
  li_st_write_string(w, name);
  li_st_write_text(w, entry);
  w->tensor = ",", w->end = "}";
  return true;
}
LI_FN void li_st_fetch(li_st_writer *w, float *block, const float *from, int64_t n) {
  const size_t bytes = li_bytes(n);
  if (!w->device) memcpy(block, from, bytes);
  else w->failed = w->device->backend->copy(w->device, block, from, bytes, 2) != LUNA_OK;
}
/* Writes a tensor. `data` may be null if it has no elements. */
LI_FN void li_st_put_tensor(li_st_writer *w, const char *name, const luna_tensor *like, const float *data) {
  float block[1024];
  const int64_t count = li_shape_count(like->rank, like->shape);
  const int64_t step = w->device || !li_st_little() ? 1024 : count;
  if (count > 0 && !data) w->failed = true;
  if (li_st_put_entry(w, name, "F32", like, 4)) return;
  for (int64_t i = 0; i < count && !w->failed; i += step) {
    const int64_t n = li_min(step, count - i);
    if (w->device || !li_st_little()) li_st_fetch(w, block, data + i, n);
    if (li_st_little()) li_st_write_bytes(w, w->device ? block : data + i, li_bytes(n));
    for (int64_t k = 0; !li_st_little() && k < n; k++) li_st_write_little(w, li_bits_of(block[k]), 4);
  }
}

/* Puts a file's pairs, then its tensors. Names and keys must be unique. */
typedef void (*li_st_contents)(li_st_writer *w, const void *what);
LI_FN void li_st_write_header(li_st_writer *w, li_st_contents contents, const void *what) {
  w->pair = "{\"__metadata__\":{", w->tensor = "{", w->end = "{}";
  contents(w, what);
  li_st_write_text(w, w->end);
  w->pair = w->tensor = NULL;
}
/* Writes a whole file. Spaces after the JSON align the data to LI_ALIGN, so that it can be used in place. If the header
   cannot be written, nothing is. */
LI_FN bool li_st_write(li_st_writer *w, li_st_contents contents, const void *what) {
  li_st_writer counter;
  memset(&counter, 0, sizeof counter);
  li_st_write_header(&counter, contents, what);
  const uint64_t size = (counter.written + 8 + LI_ALIGN - 1) / LI_ALIGN * LI_ALIGN - 8;
  if (counter.failed || size > LI_ST_HEADER) w->failed = true;
  li_st_write_little(w, size, 8);
  li_st_write_header(w, contents, what);
  for (; counter.written < size; counter.written++) li_st_write_text(w, " ");
  contents(w, what); /* The data */
  return !w->failed;
}

LI_FN luna_status li_save_io(luna_ctx *ctx, const char *name, li_st_contents contents, const void *what,
                             const luna_io *io) {
  li_st_writer w;
  memset(&w, 0, sizeof w);
  w.write = io->write;
  w.user = io->user;
  w.device = li_on_device(ctx) ? ctx : NULL;
  if (ctx->options.measure || li_st_write(&w, contents, what)) return LUNA_OK;
  return li_fail_status(ctx, LUNA_ERROR_WRITE_FAILED, name, li_file_name(ctx));
}
LI_FN void li_put_pairs(li_st_writer *w, const luna_params *params) {
  char horizon[24];
  for (const li_meta *m = params->metas; m; m = m->next) li_st_put_pair(w, m->key, m->value);
  li_print(horizon, sizeof horizon, "%d", params->horizon);
  if (params->horizon > 0) li_st_put_pair(w, "luna.horizon", horizon);
  if (params->horizon_fixed) li_st_put_pair(w, "luna.fixed_horizon", "1");
}
LI_FN void li_put_set(li_st_writer *w, const void *set) {
  const luna_params *params = (const luna_params *)set;
  li_put_pairs(w, params);
  for (const li_param *p = params->first; p; p = p->next)
    li_st_put_tensor(w, p->name, &p->tensor, p->tensor.data);
}
#ifndef LUNA_NO_INT8
/* Returns a row's scale or, if that is given, writes the row's integers. */
LI_FN float li_put_row(li_st_writer *w, const float *x, int64_t n, const float *scale) {
  float block[1024], largest = 0;
  int8_t q[1024];
  for (int64_t i = 0, part; i < n && !w->failed; i += part) {
    part = li_min(1024, n - i);
    li_st_fetch(w, block, x + i, part);
    for (int64_t j = 0; j < part && !w->failed; j++) {
      if (scale) q[j] = li_int8_of(block[j], *scale);
      else if (!li_is_finite(block[j])) return NAN;
      else if (fabsf(block[j]) > largest) largest = fabsf(block[j]);
    }
    if (scale) li_st_write_bytes(w, q, (size_t)part);
  }

  return li_int8_scale(largest);
}

/* Puts a set in 8 bits. Scales and float tensors come first, so that they are aligned, then integers. A weight stays
   float if another parameter has the name of its scales. */
LI_FN void li_put_set_int8(li_st_writer *w, const void *set) {
  const luna_params *params = (const luna_params *)set;
  char scales[LI_ST_NAME];
  li_put_pairs(w, params);
  for (int pass = 0; pass < 2; pass++)
    for (const li_param *p = params->first; p; p = p->next) {
      const luna_tensor *t = &p->tensor, like = li_like(t->ctx, 1, t->shape);
      li_print(scales, sizeof scales, "%s.scale", p->name);
      if (!li_int8_part(p->name, t->rank, t->shape) || li_param_find(params, scales)) {
        if (pass == 0) li_st_put_tensor(w, p->name, t, t->data);
        continue;
      }
      if (pass == 0 && li_st_put_entry(w, scales, "F32", &like, 4)) continue;
      if (pass == 1 && li_st_put_entry(w, p->name, "I8", t, 1)) continue;
      for (int64_t r = 0; r < t->shape[0] && !w->failed; r++) {
        const float *row = t->data + r * t->shape[1], scale = li_put_row(w, row, t->shape[1], NULL);
        if (pass == 0) li_st_write_little(w, li_bits_of(scale), 4);
        else (void)li_put_row(w, row, t->shape[1], &scale);
      }
    }
}
#endif
LI_FN bool li_buffer_write(void *to, const void *bytes, size_t size) {
  luna_file *file = (luna_file *)to;
  if (*file->written <= file->size && size <= file->size - *file->written)
    li_copy((char *)file->buffer + *file->written, bytes, size);
  *file->written += size;
  return true;
}
/* Returns whether a file's tensor is a parameter, the scales of an I8 parameter, or luna.h's own. */
LI_FN bool li_st_known(const luna_params *params, const li_st *st, const li_st_tensor *t) {
  char name[LI_ST_NAME];
  li_st_tensor matrix;
  const size_t size = li_st_decode(t->name, name, sizeof name);
  if (li_st_ours(t->name)) return true;
  if (size >= sizeof name || strlen(name) != size) return false; /* Parameters' names have no zero byte. */
  if (li_param_find(params, name)) return true;
  if (size < 6 || strcmp(name + size - 6, ".scale") != 0) return false;
  name[size - 6] = 0;
  return li_param_find(params, name) && li_st_find(st, name, &matrix) && matrix.dtype == LI_ST_I8;
}
LI_FN luna_status li_not_a_model(luna_ctx *ctx, const char *why) {
  return li_fail_status(ctx, LUNA_ERROR_NOT_A_MODEL, ctx->call, li_file_name(ctx), why);
}

/* Compares the file's config, as far as it has one, with the set's; tensors do not tell all of it. Dropouts may
   differ, and so may the longest sequence, which is in the shape of a learned table. */
LI_FN luna_status li_load_config(const luna_params *params, const li_st *st) {
  luna_ctx *ctx = params->ctx;
  char in_file[40];
  li_st_text value;
  if (li_st_is_newer(st)) return li_not_a_model(ctx, LI_NEWER);

  const char *hook = luna_params_get_text(params, LI_HOOK_KEY);
  const bool linformer = hook && strcmp(hook, LI_LINFORMER) == 0 && li_st_is_linformer(st);
  for (const li_meta *m = params->metas; m && li_st_meta(st, "luna.kind", &value); m = m->next) {
    const bool hooks = strncmp(m->key, LI_HOOK_PREFIX, sizeof LI_HOOK_PREFIX - 1) == 0;
    if (!li_is_ours(m->key) || (!hooks && (strstr(m->key, "dropout") || strstr(m->key, "length")))) continue;
    if (!li_st_meta(st, m->key, &value) || li_st_equal(value, m->value)) continue;
    if (linformer && strcmp(m->key, "luna.attention") == 0) continue;
    li_st_decode(value, in_file, sizeof in_file);
    return li_fail_status(ctx, LUNA_ERROR_FILE_CONFIG, ctx->call, m->key, in_file, li_file_name(ctx), m->value);
  }

  return LUNA_OK;
}

/* Before a load changes anything, checks the config and that each tensor and parameter has its match. */
LI_FN luna_status li_load_check(luna_params *params, const li_st *st) {
  luna_ctx *ctx = params->ctx;
  const char *file = li_file_name(ctx);
  char name[80];
  li_st_tensor t;
  size_t cursor = 0;
  const luna_status status = li_load_config(params, st);
  if (status != LUNA_OK) return status;

  while (li_st_next(st, &cursor, &t)) {
    if (li_st_known(params, st, &t)) continue;
    li_st_decode(t.name, name, sizeof name);
    return li_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_EXTRA, ctx->call, name, file);
  }

  for (li_param *p = params->first; p; p = p->next) {
    const li_fit fit = li_st_fit(st, p->name, &p->tensor, &t);
    if (fit == LI_FIT) continue;
    if (fit == LI_FIT_SHAPE)
      return li_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_SHAPE, ctx->call, p->name, &p->tensor, file);
    return li_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_MISSING, ctx->call, file, p->name, &p->tensor);
  }

  return LUNA_OK;
}

/* Loads all of the file's text pairs or none, in order. It skips keys that begin with "luna.", which describe the
   model, and keys with a zero byte, which no C string can hold. */
LI_FN luna_status li_load_pairs(luna_params *params, const li_st *st) {
  li_meta *pairs, *pair, **link = &params->metas;
  li_st_text key, value;
  size_t cursor = 0, size = st->pairs * sizeof *pairs;
  if (st->pairs == 0) return LUNA_OK;

  while (li_st_meta_next(st, &cursor, &key, &value)) size += key.size + value.size + 2; /* Decoding never lengthens. */
  pairs = pair = (li_meta *)li_persist_host(params->ctx, params->ctx->call, size);
  if (!pairs) return params->ctx->last_status;
  char *text = (char *)(pairs + st->pairs);
  for (params->last_meta = NULL; *link;) { /* Removes pairs that the file has. */
    if (!li_is_ours((*link)->key) && li_st_meta(st, (*link)->key, &value)) *link = (*link)->next;
    else link = &(params->last_meta = *link)->next;
  }

  for (cursor = 0; li_st_meta_next(st, &cursor, &key, &value);) {
    const size_t length = li_st_decode(key, text, key.size + 1);
    if (li_is_ours(text) || strlen(text) != length) continue;
    pair->key = text;
    pair->value = text += length + 1;
    text += li_st_decode(value, text, value.size + 1) + 1;
    *link = params->last_meta = pair;
    link = &pair++->next;
  }

  return LUNA_OK;
}
LI_FN void li_load_horizon(luna_params *params, const li_st *st) {
  li_st_text fixed;
  if (params->horizon_own) return;
  params->horizon = li_st_horizon(st);
  params->horizon_fixed = li_st_meta(st, "luna.fixed_horizon", &fixed);
}
LI_FN luna_status li_load_values(luna_params *params, const li_st *st) {
  luna_status status = LUNA_OK;
  li_st_tensor t;
  if (params->ctx->options.measure) return LUNA_OK;
  for (li_param *p = params->first; p && status == LUNA_OK; p = p->next)
    if (li_st_value(st, p->name, &t)) status = li_param_load(p, &t);
  return status;
}
/* A set that borrows its values, or whose parameters and averages have changed places, takes none from a file. */
LI_FN luna_status li_load_allowed(luna_ctx *ctx, const luna_params *params) {
  if (params->shared) return li_fail_status(ctx, LUNA_ERROR_SET_BORROWED, ctx->call);
#ifndef LUNA_NO_TRAIN
  for (const luna_optimizer *o = ctx->optimizers; o; o = o->next)
    if (o->params == params && o->swapped) return li_fail_status(ctx, LUNA_ERROR_AVERAGE_SWAPPED, ctx->call);
#endif
  return LUNA_OK;
}
LI_FN luna_status li_load(luna_ctx *ctx, void *set, li_st *st) {
  luna_params *params = (luna_params *)set;
  luna_status status = li_load_allowed(ctx, params);
  if (status == LUNA_OK) status = li_load_check(params, st);
  if (status == LUNA_OK) status = li_load_pairs(params, st);
  if (status != LUNA_OK) return status;
  li_load_horizon(params, st);
  return li_load_values(params, st);
}

/* Loads a file `into` something. The file's index is in the step. */
typedef luna_status (*li_loader)(luna_ctx *ctx, void *into, li_st *st);
/* Reads a whole file and loads it. If io has no read, `user` points to the file's bytes. Chunks of the step that were
   added for this go back to the allocator, because no later step may need them. */
LI_FN luna_status li_read(luna_ctx *ctx, const char *name, li_loader load, void *into, const luna_io *io) {
  luna_status status = LUNA_OK;
  const char *wrong = NULL;
  void *bytes = io->user;
  li_st st;
  if (!ctx) return LUNA_BAD_ARGUMENT;

  const char *outer = li_enter(ctx, name);
  const li_mark mark = li_step_mark(ctx);
  const size_t peak = ctx->arena[0].step_peak;
  li_chunk **newer = &ctx->arena[0].steps;
  while (*newer) newer = &(*newer)->next;
  if (io->read && (io->size > SIZE_MAX / 4 || !li_step(ctx, (size_t)io->size, false, &bytes)))
    status = li_fail_memory(ctx, ctx->call, io->size);
  else if (io->read && io->size && !io->read(io->user, bytes, (size_t)io->size))
    status = li_fail_status(ctx, LUNA_ERROR_READ_FAILED, ctx->call, li_file_name(ctx), (int64_t)io->size);
  else wrong = bytes || io->size == 0 ? li_st_open(&st, bytes, (size_t)io->size) : "bytes is null";
  if (status == LUNA_OK && !wrong) {
    const size_t need = (st.tensors + st.pairs + 1) * sizeof(uint64_t);
    uint64_t *index = (uint64_t *)li_step_host(ctx, ctx->call, need);
    if (!index) status = ctx->last_status;
    else wrong = li_st_index(&st, index, index + st.tensors);
  }

  if (wrong) status = li_fail_status(ctx, LUNA_ERROR_NOT_SAFETENSORS, ctx->call, li_file_name(ctx), wrong);
  if (status == LUNA_OK) status = load(ctx, into, &st);
  li_step_rewind(ctx, mark);
  while (*newer) li_chunk_close(ctx, newer);
  if (newer == &ctx->arena[0].steps) ctx->step.chunk[0] = NULL;
  ctx->arena[0].step_peak = peak;
  li_leave(ctx, outer);

  return status;
}

LUNA_API luna_status luna_file_tensor_read(const luna_file_tensor *entry, float *out) {
  li_st_tensor t;
  memset(&t, 0, sizeof t);
  if (!entry || !entry->dtype || !out) return LUNA_BAD_ARGUMENT;
  while (t.dtype < LI_ST_DTYPES && strcmp(li_st_formats[t.dtype].name, entry->dtype) != 0) t.dtype++;
  t.count = entry->count;
  t.data = (const uint8_t *)entry->data;
  t.bytes = entry->bytes;
  if (t.dtype < LI_ST_DTYPES && li_st_floats(&t, out)) return LUNA_OK;
  return LUNA_UNSUPPORTED;
}
/* Decodes a string of the file in the step's memory. Returns null if memory is out. */
LI_FN const char *li_step_text(luna_ctx *ctx, li_st_text text) {
  const size_t size = li_st_decode(text, NULL, 0) + 1;
  char *out = (char *)li_step_host(ctx, ctx->call, size);
  if (out) li_st_decode(text, out, size);
  return out;
}

LI_FN luna_status li_inspect(luna_ctx *ctx, void *into, li_st *st) {
  const luna_inspection *inspection = (const luna_inspection *)into;
  const li_mark mark = li_step_mark(ctx);
  li_st_tensor t;
  li_st_text key, value;
  if (inspection->pair) {
    for (size_t cursor = 0; li_st_meta_next(st, &cursor, &key, &value);) {
      const char *k = li_step_text(ctx, key), *v = k ? li_step_text(ctx, value) : NULL;
      if (!v) return LUNA_OUT_OF_MEMORY;
      inspection->pair(inspection->user, k, v);
      li_step_rewind(ctx, mark);
    }
  }

  if (inspection->tensor) {
    for (size_t cursor = 0; li_st_next(st, &cursor, &t);) {
      const char *name = li_step_text(ctx, t.name);
      luna_file_tensor entry = { name, li_st_formats[t.dtype].name, t.rank, { 0 }, t.count, t.data, t.bytes };
      if (!name) return LUNA_OUT_OF_MEMORY;
      memcpy(entry.shape, t.shape, (size_t)t.rank * sizeof t.shape[0]);
      inspection->tensor(inspection->user, &entry);
      li_step_rewind(ctx, mark);
    }
  }

  return LUNA_OK;
}
typedef struct li_matching { luna_params *params; luna_load_report *report; } li_matching;
LI_FN luna_status li_load_matching(luna_ctx *ctx, void *into, li_st *st) {
  static const char *const why[] = { NULL, "is not in the file", "has another shape in the file",
                                     "is not stored as real numbers" };
  luna_params *params = ((li_matching *)into)->params;
  luna_load_report none, *m = ((li_matching *)into)->report;
  char name[LI_MAX_PARAM_NAME];
  luna_status status = li_load_allowed(ctx, params);
  li_st_tensor t;
  size_t cursor = 0;
  memset(&none, 0, sizeof none);
  if (!m) m = &none;
  if (status != LUNA_OK) return status;

  m->loaded = m->missing = m->unused = 0;
  for (li_param *p = params->first; p && status == LUNA_OK; p = p->next) {
    const li_fit fit = li_st_fit(st, p->name, &p->tensor, &t);
    if (fit != LI_FIT) {
      m->missing++;
      if (m->report) m->report(m->user, p->name, why[fit]);
      continue;
    }
    m->loaded++;
    if (!ctx->options.measure) status = li_param_load(p, &t);
  }

  if (status != LUNA_OK) return status;
  while (li_st_next(st, &cursor, &t)) {
    if (li_st_known(params, st, &t)) continue;
    m->unused++;
    li_st_decode(t.name, name, sizeof name);
    if (m->report) m->report(m->user, name, "is in the file and no parameter here");
  }

  if (m->loaded) return LUNA_OK;
  return li_fail_status(ctx, LUNA_ERROR_NOTHING_MATCHES, ctx->call, params->size, li_file_name(ctx));
}
/* Lists the kinds of model in the order of luna_model_kind, with their names in a file and places in a luna_model. */
#define LI_KIND(name, member) { name, offsetof(luna_model, member), sizeof(((luna_model *)NULL)->member) }
static const struct { const char *name; size_t at, size; } li_kinds[] = {
  LI_KIND(LI_LM_KIND, lm), LI_KIND("classifier", classifier), LI_KIND("masked_lm", masked_lm),
  LI_KIND("seq2seq", seq2seq) };
LI_FN luna_status li_model_init(luna_model *model, luna_params *params, li_model_config *m) {
  m->classifier.encoder = m->masked_lm.encoder = m->seq2seq.encoder = m->encoder;
  m->classifier.vocab = m->masked_lm.vocab = m->seq2seq.vocab = m->vocab;
  if (model->kind == LUNA_MODEL_LM) return luna_lm_init(&model->lm, params, &m->lm);
  if (model->kind == LUNA_MODEL_CLASSIFIER) return luna_classifier_init(&model->classifier, params, &m->classifier);
  if (model->kind == LUNA_MODEL_MASKED_LM) return luna_masked_lm_init(&model->masked_lm, params, &m->masked_lm);
  return luna_seq2seq_init(&model->seq2seq, params, &m->seq2seq);
}

/* li_load_kind loads a model of `kind` into setup's struct. 0 stands for a luna_model of any kind. */
typedef struct li_kind_load { li_setup setup; luna_model_kind kind; } li_kind_load;
/* Loads a model. Its init takes each parameter from the file, and fails if the file lacks that name and shape. The file
   may have no other tensors. */
LI_FN luna_status li_load_kind(luna_ctx *ctx, void *into, li_st *st) {
  const li_kind_load *load = (const li_kind_load *)into;
  luna_params *params = load->setup.params;
  const int64_t count = li_st_tensors(st, NULL);
  luna_model model;
  li_model_config m;
  li_st_text kind;
  int k = 0;
  memset(&model, 0, sizeof model);
  memset(&m, 0, sizeof m);
  if (params->size) return li_fail_status(ctx, LUNA_ERROR_SET_NOT_EMPTY, ctx->call, params->size);
  if (!li_st_meta(st, "luna.kind", &kind)) return li_not_a_model(ctx, LI_NO_KIND);

  while (k < LI_LENGTH(li_kinds) && !li_st_equal(kind, li_kinds[k].name)) k++;
  if (k == LI_LENGTH(li_kinds)) return li_not_a_model(ctx, "its luna.kind is unknown");
  model.kind = (luna_model_kind)(LUNA_MODEL_LM + k);
  if (load->kind && load->kind != model.kind)
    return li_fail_status(ctx, LUNA_ERROR_FILE_KIND, ctx->call, li_file_name(ctx), li_kinds[k].name,
                          li_kinds[load->kind - LUNA_MODEL_LM].name);
  if (li_st_is_newer(st)) return li_not_a_model(ctx, LI_NEWER);

  const bool lm = model.kind == LUNA_MODEL_LM;
  const luna_layer_config *layer = lm ? &m.lm.layer : &m.encoder.layer;
  const char *wrong = lm ? li_fields_read(st, LI_OF_LM, &m.lm) : li_fields_read(st, LI_OF_ENCODER, &m);
  if (wrong) return li_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, wrong, li_file_name(ctx));
  if (layer->dim % layer->heads) return li_not_a_model(ctx, LI_NO_HEADS);

  /* Sizes in metadata are untrusted. A parameter is looked up in the file before its memory is taken. Layers, whose
     memory comes first, may not outnumber the file's tensors. */
  const int64_t layers = m.encoder.tied_layers ? 1 : m.encoder.layers;
  if (li_max(layers, li_max(m.lm.layers, m.seq2seq.decoder_layers)) > count)
    return li_not_a_model(ctx, LI_NO_LAYERS);
  if (m.lm.features && !m.lm.outputs) return li_not_a_model(ctx, "it has luna.features without luna.outputs");
  if (!li_hook_load(ctx, st, &m.lm.layer.hook)) return ctx->last_status;

  m.encoder.layer.hook = m.lm.layer.hook;
  if (li_st_is_linformer(st)) m.encoder.layer.attention = LUNA_ATTENTION_LUNA;
  params->filling = params->shared ? NULL : st;
  luna_status status = li_model_init(&model, params, &m);
  params->filling = NULL;
  if (status == LUNA_OK && params->size != count)
    status = li_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_COUNT, ctx->call, li_file_name(ctx), count, params->size);

  /* A hook's init may have drawn values. */
  if (status == LUNA_OK && !params->shared && m.lm.layer.hook) status = li_load_values(params, st);
  if (status == LUNA_OK && !params->shared) status = li_load_pairs(params, st);
  if (status != LUNA_OK) return status;
  li_load_horizon(params, st);
  memcpy(load->setup.made, (const char *)&model + (load->kind ? li_kinds[k].at : 0), load->setup.size);

  return LUNA_OK;
}
/* --- Training files: moments are tensors "luna.moment<i>.<name>"; the optimiser's and the context's counters are pairs
   of 16 hexadecimal digits --- */
#ifndef LUNA_NO_TRAIN
/* A run's counters have keys in the same order. lr has a float's bits. */
typedef struct li_counters { uint64_t kind, attempts, updates, skipped, lr, step, seed, skipped_in_row; } li_counters;
static const char *const li_counter_keys[] = { "luna.optimizer", "luna.attempts", "luna.updates", "luna.skipped",
                                               "luna.lr", "luna.step", "luna.seed", "luna.skipped_in_row" };
#define LI_COUNTERS LI_LENGTH(li_counter_keys)
#define LI_PRODUCTS "luna.products" /* Absent: float32 */
#define LI_OPTIMIZER_NAME "luna.optimizer_name"
#define LI_UNREACHED "luna.unreached" /* Older files lack it. With ".NAME": no update has reached this parameter. */

LI_FN bool li_unhex(const li_st *st, const char *key, uint64_t *out) {
  li_st_text value;
  *out = 0;
  if (!li_st_meta(st, key, &value) || value.size != 16) return false;
  for (size_t i = 0; i < 16; i++) {
    const char *digit = (const char *)memchr(li_hex_digits, value.at[i], 16); /* Lower case */
    if (!digit) return false;
    *out = *out << 4 | (uint64_t)(digit - li_hex_digits);
  }
  return true;
}
/* An optimiser keeps each parameter's moments and then, if it has one, its average. */
LI_FN int64_t li_kept_count(const luna_optimizer *o) { return o->size * o->kept; }
typedef struct li_kept { char name[LI_MAX_PARAM_NAME + 24]; const luna_tensor *like; float *data; } li_kept;
LI_FN void li_kept_at(const luna_optimizer *o, int64_t index, li_kept *kept) {
  const li_trained *t = &o->trained[index / o->kept];
  const int64_t k = index % o->kept;
  if (k < o->moments) li_print(kept->name, sizeof kept->name, "luna.moment%d.%s", k + 1, t->name);
  else li_print(kept->name, sizeof kept->name, "luna.average.%s", t->name);
  kept->like = t->tensor;
  kept->data = t->moment[k];
}
LI_FN bool li_kept_find(const li_st *st, const li_kept *kept, li_st_tensor *out) {
  return li_st_find(st, kept->name, out) && li_st_like(out, kept->like) && out->dtype == LI_ST_F32;
}

/* One half of a carried state is saved as it is in memory, with its positions, as if it were floats. */
#define LI_STATE "luna.state"
LI_FN float *li_state_bytes(const luna_lm_state *s, luna_tensor *like);
LI_FN void li_put_training(li_st_writer *w, const void *optimizer) {
  const luna_optimizer *o = (const luna_optimizer *)optimizer;
  luna_ctx *ctx = o->ctx;
  luna_step_state updates, step;
  li_kept kept;
  char text[17];
  uint64_t value[LI_COUNTERS];
  luna_tensor like;
  if (li_state_read(ctx, o->state, &updates)) w->failed = true;
  if (li_state_read(ctx, ctx->state, &step)) w->failed = true;
  const li_counters counters = { (uint64_t)o->kind, (uint64_t)o->attempts, updates.updates, updates.skipped,
                                 li_bits_of(o->config.lr), step.step, step.seed, updates.skipped_in_row };
  memcpy(value, &counters, sizeof value);

  for (int k = 0; k < LI_COUNTERS; k++) {
    for (int i = 0; i < 16; i++) text[i] = li_hex_digits[value[k] >> (60 - 4 * i) & 15];
    text[16] = 0;
    li_st_put_pair(w, li_counter_keys[k], text);
  }

  if (o->hook) li_st_put_pair(w, LI_OPTIMIZER_NAME, o->hook->name);
  if (ctx->options.products == LUNA_DTYPE_BF16) li_st_put_pair(w, LI_PRODUCTS, "bf16");
  li_st_put_pair(w, LI_UNREACHED, "");
  for (int64_t i = 0; i < o->size; i++) {
    li_print(kept.name, sizeof kept.name, LI_UNREACHED ".%s", o->trained[i].name);
    if (!o->trained[i].reached) li_st_put_pair(w, kept.name, "");
  }

  li_put_set(w, o->params);
  for (int64_t i = 0; i < li_kept_count(o); i++) {
    li_kept_at(o, i, &kept);
    li_st_put_tensor(w, kept.name, kept.like, kept.data);
  }

  if (o->params->state) {
    const float *data = li_state_bytes(o->params->state, &like);
    li_st_put_tensor(w, LI_STATE, &like, data);
  }
}
/* Compares the optimiser with a file's. Old files name no hook, because every hook was Apollo's. */
LI_FN luna_status li_optimizer_compare(const luna_optimizer *o, const li_st *st, uint64_t kind) {
  static const char *const names[] = { "SGD", "Adam", "AdamW", "Apollo" };
  char hook[LI_HOOK_NAME + 1];
  li_st_text text;
  const char *name = kind < (uint64_t)LI_LENGTH(names) ? names[kind] : "an unknown kind";
  const char *own = o->hook ? o->hook->name : names[o->kind];
  if (kind == LUNA_OPTIMIZER_HOOK && li_st_meta(st, LI_OPTIMIZER_NAME, &text)) {
    (void)li_st_decode(text, hook, sizeof hook); /* Longer names are cut, and differ. */
    name = hook;
  }
  if (kind == (uint64_t)o->kind && strcmp(name, own) == 0) return LUNA_OK;
  return li_fail_status(o->ctx, LUNA_ERROR_OPTIMIZER_KIND, o->ctx->call, li_file_name(o->ctx), name, own);
}

LI_FN luna_status li_training_check(luna_optimizer *o, const li_st *st, li_counters *c) {
  luna_ctx *ctx = o->ctx;
  const char *file = li_file_name(ctx);
  uint64_t value[LI_COUNTERS];
  li_kept kept;
  li_st_tensor t;
  li_st_text text;
  size_t cursor = 0;
  int64_t count = 0;
  if (!li_st_meta(st, li_counter_keys[0], &text)) return li_fail_status(ctx, LUNA_ERROR_NOT_TRAINING, ctx->call, file);

  for (int k = 0; k < LI_COUNTERS; k++) {
    const bool optional = k == LI_COUNTERS - 1; /* Older files lack it. */
    if (!li_unhex(st, li_counter_keys[k], &value[k]) && !(optional && !li_st_meta(st, li_counter_keys[k], &text)))
      return li_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, li_counter_keys[k], file);
  }

  memcpy(c, value, sizeof value);
  const luna_status compared = li_optimizer_compare(o, st, c->kind);
  if (compared != LUNA_OK) return compared;
  const float lr = li_float_of((uint32_t)(c->lr & UINT32_MAX));
  if (c->lr >> 32 || !(lr >= 0 && lr < INFINITY) || li_rates_too_large(o, lr))
    return li_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, "luna.lr", file);

  /* luna_optimizer_advance counts attempts, luna_optimizer_apply the rest; the latter may be called less often. */
  if ((c->attempts | c->updates | c->skipped) >> 62 || c->skipped_in_row > c->skipped)
    return li_fail_status(ctx, LUNA_ERROR_FILE_COUNTERS, ctx->call, file, (int64_t)c->attempts, (int64_t)c->updates,
                          (int64_t)c->skipped, (int64_t)c->skipped_in_row);
  while (li_st_next(st, &cursor, &t)) count += li_st_ours(t.name) && !li_st_equal(t.name, LI_STATE);
  if (count != li_kept_count(o)) {
    const char *advice = "make model and optimiser with the configs of that training";
    if (o->size == 0) advice = "init the model before";
    else if (count == o->size * (o->kept + 1) && o->kept == o->moments) advice = "set .average in its config";
    else if (count == o->size * o->moments) advice = "leave .average 0 in its config";
    return li_fail_status(ctx, LUNA_ERROR_MOMENT_COUNT, ctx->call, file, count, li_kept_count(o), advice);
  }

  for (int64_t i = 0; i < count; i++) {
    li_kept_at(o, i, &kept);
    if (!li_kept_find(st, &kept, &t))
      return li_fail_status(ctx, LUNA_ERROR_MOMENT, ctx->call, i % o->kept + 1, o->trained[i / o->kept].name, file);
  }

  return LUNA_OK;
}
LI_FN bool li_state_places(const luna_lm_state *s, const li_st_tensor *bytes);
LI_FN luna_status li_state_find(const luna_params *params, const li_st *st, li_st_tensor *bytes) {
  luna_tensor like;
  if (!params->state) return LUNA_OK;
  (void)li_state_bytes(params->state, &like);
  if (li_st_find(st, LI_STATE, bytes) && li_st_like(bytes, &like) &&
      bytes->bytes == li_bytes(bytes->count) && li_state_places(params->state, bytes)) return LUNA_OK;
  return li_fail_status(params->ctx, LUNA_ERROR_STATE_MISSING, params->ctx->call, li_file_name(params->ctx));
}
/* Tells options.log if a run resumes with other products, or without its carried state. */
LI_FN void li_training_differs(const luna_params *params, const li_st *st) {
  static const char *const names[2] = { "float32", "bf16" };
  const luna_ctx *ctx = params->ctx;
  const int own = ctx->options.products == LUNA_DTYPE_BF16;
  li_st_text text;
  li_st_tensor state;
  if (!params->state && li_st_find(st, LI_STATE, &state))
    li_note(ctx, "%s: the run in %s carried a state, which is dropped: call luna_lm_state_open before", ctx->call,
            li_file_name(ctx));
  const int before = li_st_meta(st, LI_PRODUCTS, &text) && li_st_equal(text, "bf16");
  if (before != own)
    li_note(ctx, "%s: the run in %s had products in %s, and goes on in %s (options.products)", ctx->call,
            li_file_name(ctx), names[before], names[own]);
}

LI_FN bool li_was_reached(const li_st *st, const li_trained *t) {
  char key[LI_MAX_PARAM_NAME + 24];
  li_st_text text;
  li_print(key, sizeof key, LI_UNREACHED ".%s", t->name);
  return !li_st_meta(st, key, &text);
}
/* Parameters that the run had reached need a gradient, for updates move them on without another luna_backward. */
LI_FN luna_status li_reach_again(const luna_optimizer *o, const li_st *st) {
  li_st_text text;
  if (!li_st_meta(st, LI_UNREACHED, &text)) return LUNA_OK;
  for (int64_t i = 0; i < o->size; i++) {
    const li_trained *t = &o->trained[i];
    if (t->tensor->needs_grad && li_was_reached(st, t) && !li_grad_take(o->ctx, t->tensor, false))
      return li_fail_memory(o->ctx, o->ctx->call, li_bytes(luna_count(t->tensor)));
  }
  return LUNA_OK;
}

/* Checks the whole file, then loads parameters, moments, the carried state and the counters. */
LI_FN luna_status li_load_training(luna_ctx *ctx, void *into, li_st *st) {
  luna_optimizer *o = (luna_optimizer *)into;
  li_st_tensor state_bytes, t;
  luna_tensor like;
  li_counters counters;
  li_kept kept;
  memset(&counters, 0, sizeof counters); /* Some compilers do not see that the check sets them. */
  luna_status status = li_optimizer_join(o, ctx->call);
  if (status == LUNA_OK) status = li_training_check(o, st, &counters);
  if (status == LUNA_OK) status = li_state_find(o->params, st, &state_bytes);
  if (status == LUNA_OK) status = li_load_allowed(ctx, o->params);
  if (status == LUNA_OK) status = li_reach_again(o, st);
  if (status == LUNA_OK) status = li_load(ctx, o->params, st);
  if (status == LUNA_OK) status = luna_params_zero_grad(o->params); /* Pending gradients are not that run's. */
  if (status != LUNA_OK || ctx->options.measure) return status;

  for (int64_t i = 0; i < li_kept_count(o) && status == LUNA_OK; i++) {
    li_kept_at(o, i, &kept);
    if (li_kept_find(st, &kept, &t)) status = li_fill(ctx, kept.data, &t);
  }
  if (status != LUNA_OK) return status;

  for (int64_t i = 0; i < o->size; i++) o->trained[i].reached = li_was_reached(st, &o->trained[i]);
  o->backwards = ctx->backwards;
  if (li_step_failed(ctx)) { /* The next begin starts that run's next step. It does not repeat this one. */
    if (ctx->carried) li_state_turn(ctx->carried);
    ctx->differentiated = true;
  }
  if (o->params->state) li_st_floats(&state_bytes, li_state_bytes(o->params->state, &like));
  luna_step_state state;
  status = li_state_read(ctx, o->state, &state);
  state.updates = counters.updates;
  state.skipped = counters.skipped;
  state.skipped_in_row = o->skipped_in_row = counters.skipped_in_row;
  o->attempts = (int64_t)counters.attempts;
  o->config.lr = li_float_of((uint32_t)counters.lr);
  if (status == LUNA_OK) status = ctx->backend->copy(ctx, o->state, &state, sizeof state, 1);
  if (status == LUNA_OK) status = li_state_read(ctx, ctx->state, &state);
  state.step = counters.step;
  state.seed = counters.seed;
  if (status != LUNA_OK) return status;

  li_training_differs(o->params, st);
  return ctx->backend->copy(ctx, ctx->state, &state, sizeof state, 1);
}
#endif /* !LUNA_NO_TRAIN */

/* --- Files by path --- */
#ifndef LUNA_NO_STDIO
#include <stdio.h>
#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
#define li_seek _fseeki64
#define li_tell _ftelli64
#else
#define li_seek fseek
#define li_tell ftell
#endif
#if defined(__unix__) || defined(__APPLE__)
#define LI_POSIX_FILES
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__STRICT_ANSI__) && !defined(__cplusplus)
int (fileno)(FILE *stream); /* Strict C99 headers do not declare these POSIX functions. */
FILE *fdopen(int descriptor, const char *mode);
int fsync(int descriptor);
int fchmod(int descriptor, mode_t mode);
ssize_t readlink(const char *path, char *to, size_t room);
#endif
#endif

LI_FN bool li_file_write(void *user, const void *bytes, size_t size) {
  return fwrite(bytes, 1, size, (FILE *)user) == size;
}
LI_FN bool li_file_read(void *user, void *bytes, size_t size) {
  return fread(bytes, 1, size, (FILE *)user) == size;
}

/* --- A save writes a new file, .luna-<n>.tmp, in the old file's folder, and then renames it over the old file. A later
   save in that folder removes such a file if its process has ended. --- */
#define LI_LONGEST_PATH 4096
#define LI_SAVERS 1000 /* Savers of one folder */
typedef struct li_saving_file {
  char path[LI_LONGEST_PATH], temporary[LI_LONGEST_PATH]; /* Target; written file */
  size_t folder; /* Length, with separator */
  FILE *file;
#ifdef _WIN32
  HANDLE lock;
#elif defined(LI_POSIX_FILES)
  bool replaces; /* A file with `mode` */
  mode_t mode;
#endif
} li_saving_file;

LI_FN size_t li_folder_of(const char *path) {
  size_t i = strlen(path);
#ifdef _WIN32
  while (i > 0 && path[i - 1] != '/' && path[i - 1] != '\\' && path[i - 1] != ':') i--;
#else
  while (i > 0 && path[i - 1] != '/') i--;
#endif
  return i;
}
LI_FN void li_saving_name(li_saving_file *s, const char *format, int64_t number) {
  memcpy(s->temporary, s->path, s->folder);
  li_print(s->temporary + s->folder, sizeof s->temporary - s->folder, format, number);
}

#ifdef _WIN32
/* A lock file holds each number. No other process can open it, and it ends with its process. An older temporary file
   with that number is abandoned. */
LI_FN luna_error_id li_saving_open(li_saving_file *s) {
  struct _stat old;
  if (_stat(s->path, &old) == 0 && (old.st_mode & _S_IFMT) != _S_IFREG) return LUNA_ERROR_SAVE_IRREGULAR;
  for (int64_t number = 0; number < LI_SAVERS; number++) {
    li_saving_name(s, ".luna-%d.lock", number);
    s->lock = CreateFileA(s->temporary, GENERIC_WRITE | DELETE, 0, NULL, CREATE_NEW, FILE_FLAG_DELETE_ON_CLOSE, NULL);
    if (s->lock == INVALID_HANDLE_VALUE) {
      if (GetLastError() == ERROR_PATH_NOT_FOUND) break;
      continue;
    }
    li_saving_name(s, ".luna-%d.tmp", number);
    DeleteFileA(s->temporary);
    const int flags = _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT;
    const int descriptor = _open(s->temporary, flags, _S_IREAD | _S_IWRITE);
    s->file = descriptor < 0 ? NULL : _fdopen(descriptor, "wb");
    if (s->file) return LUNA_ERROR_NONE;
    CloseHandle(s->lock);
  }

  return LUNA_ERROR_SAVE_TEMPORARY;
}
LI_FN bool li_saving_flush(li_saving_file *s) {
  const bool flushed = fflush(s->file) == 0 && _commit(_fileno(s->file)) == 0, closed = fclose(s->file) == 0;
  s->file = NULL;
  return flushed && closed;
}
/* Retries for a second, because another process may have the file open. */
LI_FN bool li_saving_replace(const li_saving_file *s) {
  for (int i = 0; i < 200; i++, Sleep(5)) {
    if (MoveFileExA(s->temporary, s->path, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return true;
    if (GetLastError() != ERROR_ACCESS_DENIED && GetLastError() != ERROR_SHARING_VIOLATION) break;
  }
  return false;
}
LI_FN void li_saving_close(li_saving_file *s, bool replaced) {
  if (s->file) fclose(s->file);
  if (!replaced) DeleteFileA(s->temporary);
  CloseHandle(s->lock);
}
#elif defined(LI_POSIX_FILES)
/* A temporary file is locked (flock, released when its process ends) as long as it has its name. Only the lock's holder
   may rename or remove it. Before the creator locks it, another process may take it for abandoned and remove it; the
   creator then takes another number. (A 32-bit program that cannot read a file's number removes none.) */
LI_FN bool li_saving_locks(int descriptor, const char *name) {
  struct stat opened, named;
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  if (fstat(descriptor, &opened) != 0) return true;
  return stat(name, &named) == 0 && opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}
/* Removes an abandoned temporary file: a regular one of this user, with one name, that no process has locked. */
LI_FN void li_saving_sweep(const char *name) {
  struct stat old;
  char link[1];
  if (stat(name, &old) != 0 || !S_ISREG(old.st_mode) || old.st_uid != geteuid() || old.st_nlink != 1) return;
  if (readlink(name, link, 1) >= 0) return;
  const int descriptor = open(name, O_RDONLY | O_NONBLOCK);
  if (descriptor < 0) return;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && li_saving_locks(descriptor, name)) unlink(name);
  close(descriptor);
}
/* Follows a path that is a symbolic link to its target, which need not exist. */
LI_FN luna_error_id li_saving_resolve(li_saving_file *s) {
  for (int links = 0; links < 40; links++) {
    const ssize_t size = readlink(s->path, s->temporary, sizeof s->temporary);
    s->folder = size > 0 && s->temporary[0] == '/' ? 0 : li_folder_of(s->path);
    if (size < 0) return s->folder + 32 < LI_LONGEST_PATH ? LUNA_ERROR_NONE : LUNA_ERROR_SAVE_PATH;
    if (s->folder + (size_t)size >= LI_LONGEST_PATH) return LUNA_ERROR_SAVE_PATH;
    memcpy(s->path + s->folder, s->temporary, (size_t)size);
    s->path[s->folder + (size_t)size] = 0;
  }
  return LUNA_ERROR_SAVE_LINK;
}

LI_FN luna_error_id li_saving_open(li_saving_file *s) {
  const luna_error_id wrong = li_saving_resolve(s);
  struct stat old;
  if (wrong) return wrong;
  s->replaces = stat(s->path, &old) == 0;
  if (s->replaces && !S_ISREG(old.st_mode)) return LUNA_ERROR_SAVE_IRREGULAR;

  s->mode = s->replaces ? old.st_mode & 0777 : 0600;
  if (!s->replaces && errno == EOVERFLOW) s->replaces = true; /* It exists, too large for 32 bits. */
  else if (!s->replaces && errno != ENOENT) return LUNA_ERROR_SAVE_LOOKUP;
  for (int64_t number = 0; number < 16; number++) { /* Few save at once, so numbers are low. */
    li_saving_name(s, ".luna-%d.tmp", number);
    li_saving_sweep(s->temporary);
  }

  for (int64_t number = 0; number < LI_SAVERS; number++) {
    li_saving_name(s, ".luna-%d.tmp", number);
    int descriptor = open(s->temporary, O_WRONLY | O_CREAT | O_EXCL, s->replaces ? 0600 : 0666); /* Follows no link */
    if (descriptor < 0 && errno != EEXIST) break;
    if (descriptor < 0) continue;
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    if (li_saving_locks(descriptor, s->temporary) && (s->file = fdopen(descriptor, "wb")) != NULL)
      return LUNA_ERROR_NONE;
    close(descriptor);
  }

  return LUNA_ERROR_SAVE_TEMPORARY;
}
LI_FN bool li_saving_flush(li_saving_file *s) {
  if (s->replaces) (void)!fchmod(fileno(s->file), s->mode); /* Some file systems have no modes. */
  return fflush(s->file) == 0 && fsync(fileno(s->file)) == 0;
}
LI_FN bool li_saving_replace(li_saving_file *s) {
  if (rename(s->temporary, s->path) != 0) return false;
  s->path[s->folder] = 0;
  const int folder = open(s->folder ? s->path : ".", O_RDONLY);
  if (folder < 0) return true;
  fsync(folder); /* Best effort: the file is already renamed. */
  close(folder);
  return true;
}
LI_FN void li_saving_close(li_saving_file *s, bool replaced) {
  if (!replaced) unlink(s->temporary);
  fclose(s->file); /* This releases the lock after the rename. */
}
#else
/* Standard C allows no more: one saver at a time per folder. */
LI_FN luna_error_id li_saving_open(li_saving_file *s) {
  li_saving_name(s, ".luna-%d.tmp", 0);
  s->file = fopen(s->temporary, "wb");
  if (s->file) return LUNA_ERROR_NONE;
  return LUNA_ERROR_SAVE_TEMPORARY;
}
LI_FN bool li_saving_flush(li_saving_file *s) {
  const bool closed = fclose(s->file) == 0;
  s->file = NULL;
  return closed;
}
LI_FN bool li_saving_replace(const li_saving_file *s) { return rename(s->temporary, s->path) == 0; }
LI_FN void li_saving_close(li_saving_file *s, bool replaced) {
  if (s->file) fclose(s->file);
  if (!replaced) remove(s->temporary);
}
#endif

LI_FN luna_status li_save_path(luna_ctx *ctx, const char *name, li_st_contents contents, const void *what,
                               const char *path) {
  li_saving_file s;
  luna_io io = { NULL, li_file_write, NULL, 0 };
  luna_error_id wrong = LUNA_ERROR_SAVE_PATH;
  if (ctx->options.measure) return LUNA_OK;

  memset(&s, 0, sizeof s);
  if (strlen(path) + 32 <= sizeof s.path) {
    memcpy(s.path, path, strlen(path));
    s.folder = li_folder_of(path);
    wrong = li_saving_open(&s);
  }

  if (wrong) return li_fail_status(ctx, (int)wrong, name, path, (int64_t)sizeof s.path - 32);
  io.user = s.file;
  ctx->path = path;
  luna_status status = li_save_io(ctx, name, contents, what, &io);
  ctx->path = NULL;
  if (status == LUNA_OK && !li_saving_flush(&s))
    status = li_fail_status(ctx, LUNA_ERROR_WRITE_FAILED, name, path);
  if (status == LUNA_OK && !li_saving_replace(&s))
    status = li_fail_status(ctx, LUNA_ERROR_SAVE_REPLACE, name, path);
  li_saving_close(&s, status == LUNA_OK);

  return status;
}
LI_FN luna_status li_read_path(luna_ctx *ctx, const char *name, li_loader load, void *into, const char *path) {
  luna_status status;
  FILE *file = fopen(path, "rb");
  if (!file) return li_fail_status(ctx, LUNA_ERROR_CANNOT_OPEN, name, path);
  int64_t size = li_seek(file, 0, SEEK_END) == 0 ? li_tell(file) : -1;
  if (size >= 0 && (fgetc(file) != EOF || ferror(file))) size = -1; /* A folder has LONG_MAX bytes. */
  const luna_io io = { li_file_read, NULL, file, (uint64_t)size };
  rewind(file);
  ctx->path = path;
  if (size < 0 || size > INT64_MAX / 4) status = li_fail_status(ctx, LUNA_ERROR_READ_IRREGULAR, name, path);
  else status = li_read(ctx, name, load, into, &io);
  ctx->path = NULL;
  fclose(file);

  return status;
}
LUNA_API luna_file luna_path(const char *path) {
  const luna_file file = { path, NULL, NULL, 0, NULL, NULL };
  return file;
}
#endif /* !LUNA_NO_STDIO */

/* --- Any source or sink --- */
LUNA_API luna_file luna_bytes(const void *bytes, size_t size) {
  const luna_file file = { NULL, bytes, NULL, size, NULL, NULL };
  return file;
}
LUNA_API luna_file luna_buffer(void *buffer, size_t capacity, size_t *written) {
  const luna_file file = { NULL, NULL, buffer, capacity, written, NULL };
  return file;
}
LUNA_API luna_file luna_callbacks(const luna_io *io) {
  const luna_file file = { NULL, NULL, NULL, 0, NULL, io };
  return file;
}
LI_FN luna_status li_save(luna_ctx *ctx, const char *name, li_st_contents contents, const void *what, luna_file *file) {
  if (!ctx) return LUNA_BAD_ARGUMENT;
#ifndef LUNA_NO_STDIO
  if (file->path) return li_save_path(ctx, name, contents, what, file->path);
#endif
  if (file->io && file->io->write) return li_save_io(ctx, name, contents, what, file->io);
  if (!file->written || (file->size && !file->buffer))
    return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, name, "the file's path, buffer or write");
  const luna_io io = { NULL, li_buffer_write, file, 0 };
  *file->written = 0;
  const luna_status status = li_save_io(ctx, name, contents, what, &io);
  if (status != LUNA_OK || *file->written <= file->size) return status;
  return li_fail_status(ctx, LUNA_ERROR_SAVE_BUFFER, name, (int64_t)file->size, (int64_t)*file->written);
}
LI_FN luna_status li_read_file(luna_ctx *ctx, const char *name, li_loader load, void *into, const luna_file *file) {
  if (!ctx) return LUNA_BAD_ARGUMENT;
#ifndef LUNA_NO_STDIO
  if (file->path) return li_read_path(ctx, name, load, into, file->path);
#endif
  if (file->io && file->io->read) return li_read(ctx, name, load, into, file->io);
  const luna_io io = { NULL, NULL, (void *)(uintptr_t)file->bytes, file->size };
  if (file->bytes) return li_read(ctx, name, load, into, &io);
  return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, name, "the file's path, bytes or read");
}
LUNA_API luna_status luna_save(const luna_params *params, luna_file file) {
  return li_save(li_ctx_of(params), __func__, li_put_set, params, &file);
}
#ifndef LUNA_NO_INT8
LUNA_API luna_status luna_save_int8(const luna_params *params, luna_file file) {
  return li_save(li_ctx_of(params), __func__, li_put_set_int8, params, &file);
}
#endif
LUNA_API luna_status luna_load(luna_params *params, luna_file file) {
  return li_read_file(li_ctx_of(params), __func__, li_load, params, &file);
}
LUNA_API luna_status luna_load_matching(luna_params *params, luna_file file, luna_load_report *report) {
  li_matching m = { params, report };
  return li_read_file(li_ctx_of(params), __func__, li_load_matching, &m, &file);
}
LUNA_API luna_status luna_inspect(luna_ctx *ctx, luna_file file, const luna_inspection *inspection) {
  if (ctx && !inspection) return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "inspection");
  return li_read_file(ctx, __func__, li_inspect, (void *)(uintptr_t)inspection, &file);
}
LI_FN luna_status li_load_model(luna_model_kind kind, const char *name, void *model, size_t size,
                                luna_params *params, const luna_file *file) {
  li_kind_load load;
  load.kind = kind;
  const bool good = li_setup_begin(&load.setup, name, params, model, size) &&
                    li_read_file(params->ctx, name, li_load_kind, &load, file) == LUNA_OK;
  return li_setup_end(&load.setup, good);
}
LUNA_API luna_status luna_load_model(luna_model *model, luna_params *params, luna_file file) {
  return li_load_model((luna_model_kind)0 /* Any */, __func__, model, sizeof *model, params, &file);
}
LUNA_API luna_status luna_load_model_of(luna_model_kind kind, void *model, luna_params *params, luna_file file) {
  const int i = (int)kind - LUNA_MODEL_LM;
  if (i >= 0 && i < LI_LENGTH(li_kinds)) return li_load_model(kind, __func__, model, li_kinds[i].size, params, &file);
  if (!params) return LUNA_BAD_ARGUMENT;
  return li_fail_status(params->ctx, LUNA_ERROR_VALUE_RANGE, __func__, "kind", (int64_t)kind, (int64_t)LUNA_MODEL_LM,
                        (int64_t)LUNA_MODEL_SEQ2SEQ);
}
#ifndef LUNA_NO_TRAIN
/* Parameters that have not joined yet are saved with zero moments, and with their values as averages. */
LUNA_API luna_status luna_save_training(const luna_optimizer *optimizer, luna_file file) {
  luna_optimizer *o = (luna_optimizer *)(uintptr_t)optimizer;
  if (!o) return LUNA_BAD_ARGUMENT;
  if (o->swapped) return li_fail_status(o->ctx, LUNA_ERROR_AVERAGE_SWAPPED, __func__);
  luna_status status = li_optimizer_join(o, __func__);
  for (int64_t i = 0; i < o->size && status == LUNA_OK; i++) status = li_average_begin(o, &o->trained[i]);
  if (status != LUNA_OK) return status;
  return li_save(o->ctx, __func__, li_put_training, o, &file);
}
LUNA_API luna_status luna_load_training(luna_optimizer *o, luna_file file) {
  return li_read_file(o ? o->ctx : NULL, __func__, li_load_training, o, &file);
}
#endif

#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC pop_options
#endif
/* ----------------
   >>impl_stream: the layers in step form. A step takes a few rows of each sequence, and li_past holds what earlier
   tokens left. A stream is a context of its own in one block of memory. The block has its layers, as tensors on the
   model's parameters, its state, and a bump arena for a step. Measuring finds the size of that by a step that computes
   nothing. Recording keeps the ops of the first single row, and stepping runs them again. For a model on a device, all
   values are on the device, in one block. In order: memory and inputs, the step, opening (config, weights, measuring,
   layout, from bytes, from a model), running, saved states, the state that training carries. New state of a layer is
   added to li_state_part_of and li_past_take. Guarded by tests/models/stream.c, a decoder by
   tests/models/translation.c, on a device by tests/engine/device.c and tests/cuda/cuda.c.
   ---------------- */
typedef struct li_stream_layer {
  union { luna_causal_layer causal; luna_decoder_layer decoder; } of;
  li_past past;
} li_stream_layer;
struct luna_stream {
  luna_ctx ctx;                /* The stream's status, error */
  li_bump bump;                /* Layers, model, a step */
  size_t head_ops, body;       /* Ops before layers, logits */
  luna_step_state step_state;  /* Used on the host */
  li_stream_layer *layers;
  luna_lm model;               /* All but the layers */
  float *standard, *output_norm; /* Means, scales: [2, features], [2, outputs] */
  int64_t batch, chunk, horizon;
  int64_t position, first_position;
  int64_t sources;             /* As in li_past */
  float scale;                 /* The embedding's */
  bool cross;                  /* A decoder */
  bool int8;                   /* Some weights are I8 */
  size_t int8_size, int8_used; /* I8 bytes outside files */
  char *int8_at;
  char *state;                 /* li_past_take lays it out */
  size_t state_size;
  char *inputs, *host_inputs;  /* li_inputs of a step */
  float *logits;               /* [batch, outputs], on the host */
  int32_t *slots, *source_slots; /* See li_past; or null */
  size_t head, head_int8;      /* Bytes before the layers: tensors, I8 weights */
  size_t head_kept, body_kept; /* Recorded bytes before the layers, the logits */
  luna_error_id error;         /* The last call's */
  const luna_ctx *model_ctx;   /* The model's; never dereferenced */
  size_t memory_size;
  char *device_memory;
  size_t device_size;
  void *kept;                  /* The backend's, see `token` */
};

LI_FN bool li_stream_folds(const luna_layer_config *c) { return c->heads * c->memory <= c->dim + c->memory; }
/* Returns whether folded scores are a product in 8 bits. */
LI_FN bool li_stream_rounds_scores(const luna_stream *s) {
#ifdef LUNA_NO_INT8
  return (void)s, false;
#else
  const luna_layer_config *c = &s->model.config.layer;
  return s->int8 && s->sources == 1 && li_stream_folds(c) && li_int8_fits(c->dim);
#endif
}
/* A layer's state has four parts: two means, the weights of a memory that forgets, and the convolution's history.
   `bytes` is per sequence. */
#define LI_STATE_PARTS 4
typedef struct li_state_part { void *at; size_t bytes; } li_state_part;
LI_FN li_state_part li_state_part_of(const li_past *past, const luna_layer_config *c, int64_t batch, int part) {
  const int64_t mean = c->dim * c->memory, weights = c->forget ? c->heads * c->memory : 0;
  li_state_part p = { past->history, li_bytes(li_max(0, c->convolution - 1) * c->dim) };
  if (part == 3) return p;
  p.at = past->state + part * batch * mean;
  p.bytes = (size_t)(part < 2 ? mean : weights) * sizeof(double);
  return p;
}
LI_FN void *li_stream_take(char *base, size_t *used, int64_t count, size_t size) {
  const size_t bytes = li_round((size_t)count * size);
  char *at = base ? base + *used : NULL;
  *used = bytes > SIZE_MAX / 2 - *used ? SIZE_MAX / 2 : *used + bytes; /* Too large */
  return at;
}
/* Places the state from base on; a null base only counts bytes. */
LI_FN void li_past_take(li_past *past, const luna_layer_config *c, int64_t batch, char *base, size_t *used) {
  const int64_t slots = c->memory * (2 * c->dim + (c->forget ? c->heads : 0));
  past->state = (double *)li_stream_take(base, used, batch * slots, sizeof(double));
  past->history = (float *)li_stream_take(base, used, batch * li_max(0, c->convolution - 1) * c->dim, sizeof(float));
}

/* Copies bytes of the stream, or only counts them. Returns false if the device has failed, now or before. */
LI_FN bool li_stream_move(luna_stream *s, void *to, const void *from, size_t bytes, int direction) {
  luna_ctx *ctx = &s->ctx;
  if (ctx->status == LUNA_OK && li_computes(ctx))
    (void)li_backend_result(ctx, "luna_stream", ctx->backend->copy(ctx, to, from, bytes, direction));
  return ctx->status == LUNA_OK;
}
/* Copies a tensor's values to lasting memory of the stream. The tensor is null if earlier ops failed. */
LI_FN bool li_stream_store(luna_stream *s, void *to, const luna_tensor *t) {
  return t && li_stream_move(s, to, t->data, li_bytes(luna_count(t)), 0);
}

LI_FN luna_tensor li_stream_tensor(luna_stream *s, float *data, int rank, const int64_t *shape) {
  luna_tensor t;
  li_tensor_set(&t, &s->ctx, rank, shape);
  t.data = data;
  return t;
}
LI_FN luna_tensor *li_stream_put(luna_stream *s, luna_tensor t) {
  void *memory;
  if (!li_bump_take(&s->bump, false, sizeof t, &memory)) return NULL;
  return (luna_tensor *)memcpy(memory, &t, sizeof t);
}
LI_FN luna_tensor *li_stream_view(luna_stream *s, float *data, int rank, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = { a, b, c };
  return li_stream_put(s, li_stream_tensor(s, data, rank, shape));
}

/* Places a layer's tensors that are computed once, from `base` on; null only counts bytes. Scores have an axis of
   sources if there are several. A decoder also has keys and values. */
LI_FN void li_stream_take_once(luna_stream *s, li_past *past, char *base, size_t *used) {
  const luna_layer_config *c = &s->model.config.layer;
  const int64_t n = s->sources, h = c->heads, l = c->memory, d = c->dim;
  const int64_t folded[3] = { n, h * l, d }, bias[3] = { n, 1, h * l }, queries[4] = { n, h, l, d / h },
      memory[3] = { n, l, d };
  const bool folds = li_stream_folds(c);
  const int one = n == 1;
  luna_tensor *const each[4] = { &past->scores, &past->scores_bias, &past->keys, &past->values };
  if (!li_packs(c)) return;
  if (folds) past->scores = li_stream_tensor(s, NULL, 3 - one, folded + one);
  else past->scores = li_stream_tensor(s, NULL, 4 - one, queries + one);
  if (folds) past->scores_bias = li_stream_tensor(s, NULL, 3 - 2 * one, bias + 2 * one);
  if (s->cross) past->keys = past->values = li_stream_tensor(s, NULL, 3, memory);

  for (int k = 0; k < 4; k++) {
    const bool rounded = k == 0 && li_stream_rounds_scores(s);
    each[k]->data = (float *)li_stream_take(base, used, rounded ? 0 : luna_count(each[k]), sizeof(float));
  }
}

/* These inputs change from step to step, and a device gets them before the step. */
typedef struct li_inputs {
  int64_t *position;        /* Rows before these */
  int32_t *tokens, *places; /* [batch, rows]; learned: [rows] */
  float *angles;            /* Sinusoidal positions [rows, dim] */
  float *features;          /* Standardised, [batch, rows, features] */
} li_inputs;
LI_FN int64_t li_stream_angles(const luna_stream *s) {
  if (s->model.config.positions == LUNA_POSITIONS_SINUSOIDAL) return s->model.config.layer.dim;
  return 0;
}
LI_FN size_t li_stream_inputs_size(const luna_stream *s, int64_t rows) {
  return sizeof(int64_t) +
         (size_t)((s->batch + 1 + s->batch * s->model.config.features + li_stream_angles(s)) * rows) * sizeof(float);
}
LI_FN li_inputs li_stream_inputs(const luna_stream *s, char *at, int64_t rows) {
  li_inputs in;
  if (s->ctx.reserving) rows = 0; /* There are none, and addresses past memory are undefined. */
  in.position = (int64_t *)(void *)at;
  in.tokens = (int32_t *)(void *)(in.position + 1);
  in.places = in.tokens + s->batch * rows;
  in.angles = (float *)(void *)(in.places + rows);
  in.features = in.angles + li_stream_angles(s) * rows;
  return in;
}
/* Standardises a feature, as luna_input_layer_forward does. */
LI_FN float li_stream_feature(const luna_stream *s, float x, int64_t f) {
  if (x == x) return (x - s->standard[f]) * s->standard[s->model.config.features + f];
  return 0;
}

/* Sends the inputs of `rows` rows of each sequence of n, from row `at` on. A feature that does not fit becomes NaN. No
   layer remembers such a row, so its sequence stays as it was. */
LI_FN bool li_stream_send(luna_stream *s, const luna_input *from, int64_t at, int64_t rows) {
  const li_inputs in = li_stream_inputs(s, s->host_inputs, rows);
  const int64_t first = s->first_position + s->position;
  const int64_t k = s->model.config.features, angles = li_stream_angles(s);
  *in.position = s->position;

  for (int64_t i = 0; i < s->batch * rows; i++) {
    const int64_t row = i / rows * (int64_t)from->n + at + i % rows;
    if (k == 0) in.tokens[i] = from->tokens[row];
    for (int64_t f = 0; f < k; f++) {
      const float x = li_stream_feature(s, from->features[row * k + f], f);
      in.features[i * k + f] = li_feature_fits(x) ? x : NAN;
    }
  }

  for (int64_t i = 0; i < rows; i++) {
    in.places[i] = (int32_t)(first + i);
    if (angles > 0) li_sinusoid(first + i, angles, in.angles + i * angles);
  }

  return s->inputs == s->host_inputs || li_stream_move(s, s->inputs, s->host_inputs, li_stream_inputs_size(s, rows), 1);
}

/* --- A step: the layers' forward --- */
/* Runs `rows` rows of each sequence. With `last`, returns the logits after the last row, [batch, 1, vocab]. */
LI_FN luna_tensor *li_stream_forward(luna_stream *s, int64_t rows, bool last) {
  const li_inputs in = li_stream_inputs(s, s->inputs, rows);
  const int64_t positions = s->model.config.positions, d = s->model.config.layer.dim, k = s->model.config.features;
  li_bump_begin(&s->bump, rows == 1);
  luna_scope scope = luna_scope_begin(&s->ctx);
  luna_tensor *x;
  if (k == 0) x = luna_embedding(s->model.embedding, in.tokens, s->batch, rows);
  else x = luna_linear_layer_forward(&s->model.input.projection, li_stream_view(s, in.features, 3, s->batch, rows, k));
  if (s->scale != 1) x = luna_scale(x, s->scale);
  if (positions == LUNA_POSITIONS_SINUSOIDAL) x = luna_add(x, li_stream_view(s, in.angles, 2, rows, d, 1));
  if (positions == LUNA_POSITIONS_LEARNED)
    x = luna_add(x, li_reshape(luna_embedding(s->model.positions, in.places, 1, rows), 2, rows, d, 1, 1));
  if (s->bump.records) {
    s->head_ops = s->bump.count;
    s->head_kept = s->bump.part[0].used;
  }

  for (int64_t i = 0; i < s->model.config.layers && x; i++) {
    li_stream_layer *layer = &s->layers[i];
    if (s->cross) {
      li_flow f = li_flow_of(x, NULL, NULL);
      f.past = &layer->past;
      f.horizon = s->horizon;
      x = li_decoder_layer(&layer->of.decoder, &f);
    } else x = li_causal_layer(&layer->of.causal, x, &layer->past, s->horizon);
    x = li_result_so_far(&scope, x);
  }

  if (s->bump.records) {
    s->body = s->bump.count;
    s->body_kept = s->bump.part[0].used;
  }
  if (!last) return x;

  s->bump.single = true;
  if (rows > 1) x = luna_slice(x, 1, rows - 1, 1);
  x = li_normalise(&s->model.norm, x);
  return luna_linear_layer_forward(&s->model.output, x);
}
/* Runs a step of single rows and keeps its ops and their tensors. */
LI_FN luna_tensor *li_stream_record(luna_stream *s) {
  s->bump.records = true;
  luna_tensor *y = li_stream_forward(s, 1, true);
  s->bump.records = false;
  s->bump.kept = s->bump.part[0].used;
  if (!y) li_bump_forget(&s->bump);
  return y;
}
LI_FN luna_tensor *li_stream_replay(luna_stream *s, bool last) {
  const size_t count = last ? s->bump.count : s->body;
  for (luna_op *op = s->bump.ops; op < s->bump.ops + count; op++) {
    const luna_status status = s->ctx.backend->op[op->kind].forward(op);
    if (status != LUNA_OK) return li_fail_backend(&s->ctx, "luna_stream", status);
  }
  return s->bump.ops[count - 1].out[0];
}
LI_FN luna_tensor *li_stream_rows(luna_stream *s, int64_t rows, bool last) {
  if (rows > 1) return li_stream_forward(s, rows, last);
  if (s->bump.count > 0) return li_stream_replay(s, last);
  return li_stream_record(s);
}

/* Row b of each part of the state, [batch, width] floats, becomes row from[b]; `from` is in the inputs. */
LI_FN bool li_stream_reorder_all(luna_stream *s) {
  const int32_t *from = li_stream_inputs(s, s->inputs, 1).tokens;
  for (int64_t i = 0; s->batch > 1 && i < s->model.config.layers; i++)
    for (int k = 0; k < LI_STATE_PARTS; k++) {
      const li_state_part part = li_state_part_of(&s->layers[i].past, &s->model.config.layer, s->batch, k);
      const int64_t width = (int64_t)(part.bytes / sizeof(float));
      if (width == 0) continue;
      li_bump_begin(&s->bump, false);
      luna_tensor *rows = li_stream_view(s, (float *)part.at, 2, s->batch, width, 1);
      if (!li_stream_store(s, part.at, luna_embedding(rows, from, s->batch, 1))) return false;
    }
  return true;
}

/* Computes the bias of folded scores from queries [heads slots, head_dim]. Its bits depend on this order of sums. */
LI_FN void li_stream_fold_bias(const luna_layer_config *c, const float *queries, const float *key_bias, float *out) {
  const int64_t l = c->memory, d = c->dim / c->heads;
  for (int64_t i = 0, j; i < c->heads * l; i++)
    for (out[i] = 0, j = 0; j < d; j++) out[i] += queries[i * d + j] * key_bias[i / l * d + j];
}
#ifdef LUNA_NO_INT8
#define li_stream_floats(s, w) (w)
#define li_stream_int8(s, w, values) ((void)(s), (void)(w), (void)(values), (li_int8 *)NULL)
#else
/* Stands for a weight's 8-bit copy while a stream is measured. Nothing reads it. */
static const li_int8 li_int8_placeholder = { NULL, NULL, NULL, 0, 0, NULL, 0 };
/* Returns a weight as float, in the step's memory if the file has it in 8 bits. */
LI_FN luna_tensor *li_stream_floats(luna_stream *s, luna_tensor *w) {
  if (!w || !s->int8) return w;
  void *memory = w->data;
  if (!memory && !li_bump_take(&s->bump, true, li_bytes(luna_count(w)), &memory)) return NULL;
  if (!w->data && li_computes(&s->ctx)) li_int8_floats(w->int8, 0, w->shape[0], (float *)memory);
  return li_stream_view(s, (float *)memory, 2, w->shape[0], w->shape[1], 1);
}
/* Makes an 8-bit copy of w in the stream's memory or, while that is measured, counts its bytes. */
LI_FN li_int8 *li_stream_int8(luna_stream *s, const luna_tensor *w, const float *values) {
  const size_t bytes = li_int8_bytes(w->shape[0], w->shape[1]);
  if (s->ctx.reserving) s->int8_size += bytes;
  if (s->ctx.reserving) return (li_int8 *)(uintptr_t)&li_int8_placeholder;
  if (bytes > s->int8_size - s->int8_used) return NULL;
  li_int8 *copy = li_int8_place(s->int8_at + s->int8_used, w->shape[0], w->shape[1]);
  s->int8_used += bytes;
  (void)li_int8_fill(copy, values);
  return copy;
}
#endif
/* Computes the tensors that scores need from a layer's memory [sources, slots, dim]. */
LI_FN bool li_stream_fold(luna_stream *s, li_stream_layer *layer, const float *memory) {
  const luna_layer_config *c = &s->model.config.layer;
  const bool device = li_on_device(&s->ctx), folds = li_stream_folds(c);
  for (int64_t i = 0; i < s->sources; i++) {
    float *p = li_offset((float *)(uintptr_t)memory, i * c->memory * c->dim),
        *to = li_offset(layer->past.scores.data, i * luna_count(&layer->past.scores) / s->sources),
        *to_bias = li_offset(layer->past.scores_bias.data, i * c->heads * c->memory);
    luna_causal_attention_layer attention = s->cross ? layer->of.decoder.self_attention : layer->of.causal.attention;
    li_bump_begin(&s->bump, false);
    attention.pq.weight = li_stream_floats(s, attention.pq.weight);
    attention.pc.weight = li_stream_floats(s, attention.pc.weight);
    if (!attention.pq.weight || !attention.pc.weight) return false;
    luna_tensor *queries = li_causal_queries(&attention, li_stream_view(s, p, 2, c->memory, c->dim, 1)),
        *bias = NULL, *scores = queries;
    if (folds) scores = li_causal_folded(&attention, queries, device ? &bias : NULL);
    if (li_stream_rounds_scores(s)) {
      luna_tensor *kept = &layer->past.scores;
      if (!scores || !(kept->int8 = li_stream_int8(s, kept, scores->data))) return false;
    } else if (!li_stream_store(s, to, scores)) return false;
    if (folds && device && !li_stream_store(s, to_bias, bias)) return false;
    if (folds && !device && li_computes(&s->ctx))
      li_stream_fold_bias(c, queries->data, attention.pc.bias->data, to_bias);
  }

  return true;
}

/* --- Opening --- */
/* Calls begin or end with this. Sets the error if the device has failed, which ends the stream; else clears it. */
LI_FN luna_status li_stream_status(luna_stream *s) {
  s->error = s->ctx.status == LUNA_OK ? LUNA_ERROR_NONE : LUNA_ERROR_BACKEND;
  return s->ctx.status;
}

LUNA_API void luna_stream_reset(luna_stream *s) {
  if (!s || li_stream_status(s) != LUNA_OK) return;
  s->position = 0;
  (void)li_backend_result(&s->ctx, __func__, s->ctx.backend->zero(&s->ctx, s->state, s->state_size));
}

#define LI_STREAM_TOO_LARGE "a stream of these sizes is too large"
/* Puts a config and its defaults into the stream. Returns what is wrong, or null. */
LI_FN const char *li_stream_config(luna_stream *s, const luna_stream_config *config) {
  const luna_lm_config *model = &s->model.config;
  const luna_layer_config *c = &model->layer;
  luna_stream_config own;
  memset(&own, 0, sizeof own);
  if (config) own = *config;
  const int64_t batch = own.batch ? li_size(own.batch) : 1;
  const int64_t chunk = own.chunk ? li_size(own.chunk) : 64;
  const int64_t rows = li_checked(batch, chunk);
  /* The stream takes memory in proportion to these products. */
  const int64_t product[8][2] = { { rows, c->dim }, { rows, c->ffn }, { rows, model->features + 1 },
    { li_checked(rows, c->heads), c->memory }, { li_checked(batch, c->dim), li_max(1, c->convolution) },
    { li_checked(batch, c->dim), 16 * c->memory }, { batch, li_lm_outputs(model) },
    { li_checked(c->heads, c->memory), c->dim } };
  s->batch = batch;
  s->chunk = chunk;
  if (own.horizon) s->horizon = own.horizon;
  s->ctx.kernels = li_kernels_for(own.isa, own.weights != LUNA_DTYPE_F32);
  s->ctx.parallel.threads = 1;
  if (s->sources == 0) s->sources = 1;
  if (s->scale == 0) s->scale = 1;
  if (!s->ctx.kernels) return "config.isa is not available on this machine";
  if ((unsigned)own.weights > LUNA_DTYPE_I8) return "config.weights is neither F32 nor I8";

  s->int8 = own.weights == LUNA_DTYPE_I8;
#ifdef LUNA_NO_INT8
  if (s->int8) return "config.weights: this build has no products in 8 bits";
#endif
  if (s->int8 && li_on_device(&s->ctx))
    return "products in 8 bits are the CPU's; on a device config.weights must be 0";
  if (s->horizon < LUNA_HORIZON_NONE) return "config.horizon is less than LUNA_HORIZON_NONE";
  if (rows < 0) return "config.batch or config.chunk is negative or too large";

  for (int i = 0; i < 8; i++)
    if (li_checked(product[i][0], product[i][1]) < 0) return LI_STREAM_TOO_LARGE;
  return NULL;
}

/* Makes a parameter's 8-bit copy or, while the stream is measured, counts it (li_stream_int8_file has done so for a
   file). Returns null if it gets none. */
LI_FN li_int8 *li_stream_int8_of(luna_stream *s, const char *name, const luna_tensor *t) {
#ifndef LUNA_NO_INT8
  if (!s->int8 || !li_int8_part(name, t->rank, t->shape)) return NULL;
  if (s->ctx.reserving && !s->model_ctx) return (li_int8 *)(uintptr_t)&li_int8_placeholder;
  return li_stream_int8(s, t, t->data);
#else
  return (void)s, (void)name, (void)t, (li_int8 *)NULL;
#endif
}
#ifndef LUNA_NO_INT8
/* Uses a file's I8 tensor in place, and computes its sums. Returns null if the tensor or its scales are not aligned or
   not used in 8 bits. */
LI_FN li_int8 *li_stream_int8_in(luna_stream *s, const char *name, const li_st_tensor *t) {
  const size_t head = li_round(sizeof(li_int8)), bytes = head + li_round((size_t)t->shape[0] * 4);
  if (!t->scale || (uintptr_t)t->scale % sizeof(float) != 0 || !li_st_little() ||
      !li_int8_part(name, t->rank, t->shape) || bytes > s->int8_size - s->int8_used) return NULL;
  li_int8 *w = (li_int8 *)(void *)(s->int8_at + s->int8_used);
  s->int8_used += bytes;
  memset(w, 0, sizeof *w);
  w->rows = t->shape[0];
  w->columns = t->shape[1];
  w->at = (const int8_t *)t->data;
  w->scale = (const float *)(const void *)t->scale;
  w->sums = (const int32_t *)(const void *)((char *)w + head);
  li_int8_sum(w);

  return w;
}
/* Counts the memory for a file's weights: sums for I8 and, if the stream is in 8 bits, copies of others. It is in 8
   bits if any tensor of the file is. */
LI_FN void li_stream_int8_file(luna_stream *s, const li_st *st) {
  li_st_tensor t;
  char name[LI_ST_NAME];
  for (size_t cursor = 0; li_st_next(st, &cursor, &t);) s->int8 = s->int8 || t.dtype == LI_ST_I8;
  if (!s->int8) return;
  for (size_t cursor = 0; li_st_next(st, &cursor, &t);) {
    if (li_st_decode(t.name, name, sizeof name) >= sizeof name || li_st_ours(t.name) ||
        !li_int8_part(name, t.rank, t.shape)) continue;
    if (t.dtype == LI_ST_I8) s->int8_size += li_round(sizeof(li_int8)) + li_round((size_t)t.shape[0] * 4);
    else s->int8_size += li_int8_bytes(t.shape[0], t.shape[1]);
  }
}
#endif
/* Finds the values of a part, or of its bias, in the file. If it returns false, s->ctx.error says why. */
LI_FN bool li_stream_read_part(luna_stream *s, const li_part *p, bool bias, const char *prefix,
                               const li_st *st, luna_tensor *own) {
  char *name = s->ctx.error;
  li_st_tensor found;
  li_print(name, sizeof s->ctx.error, "%s%s", prefix, p->name);
  if (bias) memcpy(strrchr(name, '.'), ".bias", sizeof ".bias");
  if (li_st_value(st, name, &found) && li_st_like(&found, own)) {
    own->data = (float *)(uintptr_t)li_st_borrow(&found);
    if (own->data && !bias) own->int8 = li_stream_int8_of(s, p->name, own);
#ifndef LUNA_NO_INT8
    if (!own->data) own->int8 = li_stream_int8_in(s, p->name, &found);
#endif
  }

  if (own->data || own->int8) return true;
  li_print(name + strlen(name), sizeof s->ctx.error - strlen(name), " is missing, of another shape, not F32 (nor I8 "
           "with scales), not aligned to 4 bytes, or this machine is not little-endian");
  return false;
}

/* Makes the stream's own tensors of parts, and points the parts to them. Their values are the model's, or come from the
   file by name. Without model and file they have only a shape. */
LI_FN bool li_stream_own(luna_stream *s, const li_part *parts, int count, const char *prefix, const li_st *st) {
  for (const li_part *p = parts; p < parts + count; p++)
    for (int i = 0; i < 2; i++) {
      luna_tensor **at = i ? p->bias : p->weight;
      const int64_t shape[2] = { p->rows, p->columns };
      if (!p->has || !at || (s->model_ctx && !*at)) continue; /* A decoder's output has no bias. */
      luna_tensor own = li_stream_tensor(s, NULL, i || p->columns == LI_VECTOR ? 1 : 2, shape);
      if (s->model_ctx) own = **at; /* A decoder's parts lack its shape. */
      own.ctx = &s->ctx;
      own.own = &s->ctx.none;
      own.int8 = i || st ? NULL : li_stream_int8_of(s, p->name, &own);
      if (st && !li_stream_read_part(s, p, i == 1, prefix, st, &own)) return false;
      if ((*at = li_stream_put(s, own)) == NULL) return false;
    }
  return true;
}
/* Lists a decoder layer's parameters that a step needs. `past` has the rest of cross-attention. */
LI_FN int li_decoder_parts(luna_decoder_layer *layer, li_part *parts) {
  luna_nested_attention_layer *cross = &layer->cross_attention;
  luna_linear_layer *const linear[] = { &cross->q, &cross->out, &cross->gate };
  int count = li_causal_attention_parts(&layer->self_attention, parts);
  for (int i = 0; i < LI_LENGTH(linear); i++, count++) {
    parts[count] = parts[0]; /* Also a projection */
    parts[count].weight = &linear[i]->weight;
    parts[count].bias = &linear[i]->bias;
  }
  parts[count++] = li_norm_part(true, &layer->self_norm, ".weight", &layer->config);
  parts[count++] = li_norm_part(true, &layer->cross_norm, ".weight", &layer->config);
  return count + li_feed_forward_parts(&layer->feed_forward, &layer->config, parts + count);
}

/* Makes layer `index` from a model's `layers`, or from the file and the config. `parts` is scratch. */
LI_FN bool li_stream_layer_open(luna_stream *s, int64_t index, li_part *parts, const void *layers, const li_st *st) {
  luna_causal_layer *causal = &s->layers[index].of.causal;
  li_past *past = &s->layers[index].past;
  char prefix[48];
  past->position = li_stream_inputs(s, s->inputs, 1).position;
  past->sources = s->sources;
  past->slots = s->slots;
  past->source_slots = s->source_slots;
  if (s->cross) {
    s->layers[index].of.decoder = ((const luna_decoder_layer *)layers)[index];
    return li_stream_own(s, parts, li_decoder_parts(&s->layers[index].of.decoder, parts), "", NULL);
  }

  if (layers) *causal = ((const luna_causal_layer *)layers)[index];
  causal->config = causal->attention.config = s->model.config.layer;
  li_print(prefix, sizeof prefix, "layers.%d.", index);
  if (!li_stream_own(s, parts, li_causal_layer_parts(causal, parts), prefix, st)) return false;
  li_print(prefix, sizeof prefix, "layers.%d.self_attn.", index);

  return li_stream_own(s, parts, li_causal_attention_parts(&causal->attention, parts), prefix, st);
}
LI_FN bool li_stream_scales(luna_stream *s, float *to, const luna_tensor *mean, const luna_tensor *scale) {
  const size_t bytes = li_bytes(luna_count(mean));
  return li_stream_move(s, to, mean->data, bytes, 2) &&
         li_stream_move(s, li_offset(to, luna_count(mean)), scale->data, bytes, 2);
}
/* Makes all tensors, from a model's `layers` or from the file. */
LI_FN bool li_stream_tensors(luna_stream *s, const void *layers, const li_st *st) {
  luna_lm *m = &s->model;
  li_part parts[LI_MAX_PARTS];
  if (!li_stream_own(s, parts, li_lm_parts(m, parts), "", st)) return false;
  if (!m->config.outputs) m->output.weight = m->embedding;
  s->head = s->bump.part[0].used;
  s->head_int8 = s->int8_size;
  for (int64_t i = 0; i < m->config.layers; i++)
    if (!li_stream_layer_open(s, i, parts, layers, st)) return false;
  return true;
}
/* Fills an opened stream: its tensors and the values that are computed once, except those from a decoder's sources. */
LI_FN bool li_stream_fill(luna_stream *s, const void *layers, const li_st *st) {
  const luna_lm *m = &s->model;
  if (!li_stream_tensors(s, layers, st)) return false;
  s->bump.floor = s->bump.kept = s->bump.part[0].used;
  if (m->config.features && !li_stream_scales(s, s->standard, m->input.mean, m->input.scale)) return false;
  if (m->config.output_norm && !li_stream_scales(s, s->output_norm, m->output_mean, m->output_scale)) return false;

  for (int64_t i = 0; !s->cross && li_packs(&m->config.layer) && i < m->config.layers; i++)
    if (!li_stream_fold(s, &s->layers[i], s->layers[i].of.causal.memory->data)) return false;
  return true;
}

/* --- Measuring opens the stream with one layer (`from`: a model's first, or null) and runs its steps without
   computing. Each other layer takes the same. --- */
#define LI_MEASURED 80 /* Parameters and a step's records need at most 80 tensors. */
LI_FN bool li_stream_measure(luna_stream *s, const void *from) {
  const luna_lm model = s->model;
  const size_t more = (size_t)s->model.config.layers - 1;
  li_bump *b = &s->bump;
  size_t *peak = &b->part[0].peak, used = 0;
  luna_tensor small[LI_MEASURED];
  li_stream_layer layer;
  memset(&layer, 0, sizeof layer);
  s->ctx.bump = b;
  s->layers = &layer;
  s->inputs = (char *)s; /* Never dereferenced */
  layer.past.state = (double *)(void *)s;
  layer.past.history = (float *)(void *)s;
  li_stream_take_once(s, &layer.past, NULL, &used);
  b->part[0].start = (char *)small;
  b->part[0].size = sizeof small;
  b->part[1].size = SIZE_MAX / 2;
  b->room = SIZE_MAX;
  s->model.config.layers = 1;
  s->ctx.reserving = true;
  bool good = li_stream_fill(s, from, NULL) && (!s->cross || li_stream_fold(s, s->layers, NULL));
  const size_t opening = *peak;
  good = good && li_stream_record(s);
  const size_t kept = b->kept - b->floor;
  b->room = b->count + (s->body - s->head_ops) * more;
  li_bump_forget(b);
  *peak = b->floor;

  /* On the host, more rows take more memory. */
  for (int64_t rows = s->chunk; good && rows > 1; rows = li_on_device(&s->ctx) ? rows - 1 : 1)
    good = li_stream_forward(s, rows, true) != NULL;
  good = good && li_stream_reorder_all(s);
  /* Opening and steps use the same room, and each further layer adds its share. */
  *peak += kept;
  if (*peak < opening) *peak = opening;
  *peak += (b->floor - s->head + s->body_kept - s->head_kept) * more;
  b->part[0].used = 0;
  s->int8_size += (s->int8_size - s->head_int8) * more;
  s->ctx.reserving = false;
  s->inputs = NULL;
  s->model = model; /* Drops the placeholders */
  return good;
}

/* Lays the stream out from `base` (null: only counts) and returns its bytes. On a device, the values take device_size
   bytes from s->device_memory (null: only counts). */
LI_FN size_t li_stream_lay_out(luna_stream *s, char *base) {
  const luna_lm_config *c = &s->model.config;
  const bool device = li_on_device(&s->ctx);
  const int64_t inputs = (int64_t)li_stream_inputs_size(s, s->chunk);
  size_t used = li_round(sizeof(luna_stream));
  li_past none;
  memset(&none, 0, sizeof none);
  s->ctx.bump = &s->bump;
  s->layers = (li_stream_layer *)li_stream_take(base, &used, c->layers, sizeof(li_stream_layer));
  s->bump.part[0].start = (char *)li_stream_take(base, &used, (int64_t)s->bump.part[0].peak, 1);
  s->bump.ops = (luna_op *)li_stream_take(base, &used, (int64_t)s->bump.room, sizeof(luna_op));
  if (device) s->host_inputs = (char *)li_stream_take(base, &used, inputs, 1);
  s->logits = (float *)li_stream_take(base, &used, s->batch * li_lm_outputs(c), sizeof(float));
  s->standard = (float *)li_stream_take(base, &used, 2 * c->features, sizeof(float));
  s->output_norm = (float *)li_stream_take(base, &used, c->output_norm ? 2 * c->outputs : 0, sizeof(float));
  s->int8_at = (char *)li_stream_take(base, &used, (int64_t)s->int8_size, 1);
  const size_t host_size = used;
  if (device) { base = s->device_memory; used = 0; }
  const size_t state = used;
  s->state = base ? base + used : NULL;

  for (int64_t i = 0; i < 2 * c->layers; i++) {
    li_past *past = base ? &s->layers[i % c->layers].past : &none;
    if (i == c->layers) s->state_size = used - state;
    if (i < c->layers) li_past_take(past, &c->layer, s->batch, base, &used);
    else li_stream_take_once(s, past, base, &used);
  }

  s->slots = s->source_slots = NULL;
  if (s->cross) s->slots = (int32_t *)li_stream_take(base, &used, s->batch, sizeof(int32_t));
  if (s->cross) s->source_slots = (int32_t *)li_stream_take(base, &used, s->sources, sizeof(int32_t));
  s->inputs = (char *)li_stream_take(base, &used, inputs, 1);
  if (!device) s->host_inputs = s->inputs;

  for (int i = 0; i < 2; i++) s->bump.part[i].size = s->bump.part[i].peak;
  s->bump.part[1].start = (char *)li_stream_take(base, &used, (int64_t)s->bump.part[1].peak, 1);
  s->device_size = used;
  if (device) return host_size;
  return used;
}
/* Copies `first` to its final memory, `size` bytes by li_stream_lay_out. */
LI_FN luna_stream *li_stream_place(const luna_stream *first, void *memory, size_t size) {
  luna_stream *s = (luna_stream *)memory;
  memset(s, 0, size);
  *s = *first;
  li_stream_lay_out(s, (char *)s);
  return s;
}

/* --- Opening from a checkpoint's bytes --- */
/* Finds the bytes needed, or returns what is wrong. While a stream is opened, the index of the file's names takes the
   memory of steps' values. */
LI_FN const char *li_stream_describe(luna_stream *s, li_st *st, const void *bytes, size_t size,
                                     const luna_stream_config *config, size_t *need) {
  memset(s, 0, sizeof *s);
  s->ctx.backend = luna_cpu_backend();
  const char *wrong = bytes ? li_st_open(st, bytes, size) : "bytes is null";
  if (wrong) return wrong;
  if ((uintptr_t)st->data % sizeof(float) != 0) return "the values in bytes are not aligned to 4 bytes";
#ifdef LUNA_NO_INT8
  li_st_tensor t;

  for (size_t cursor = 0; li_st_next(st, &cursor, &t);)
    if (t.dtype == LI_ST_I8)
      return "the file has weights in 8 bits (luna_save_int8), which LUNA_NO_INT8 does not read";
#endif
  if ((wrong = li_lm_read(st, &s->model.config)) != NULL) return wrong;

  s->horizon = li_st_horizon(st);
  if ((wrong = li_stream_config(s, config)) != NULL) return wrong;
#ifndef LUNA_NO_INT8
  li_stream_int8_file(s, st);
#endif
  if (!li_stream_measure(s, NULL)) return LI_STREAM_TOO_LARGE;

  const size_t all = li_stream_lay_out(s, NULL);
  const size_t index = li_round(all - li_round(s->bump.part[1].size) + st->tensors * sizeof(uint64_t));
  *need = all > index ? all : index;
  return NULL;
}

LUNA_API size_t luna_stream_size(const void *bytes, size_t size, const luna_stream_config *config, const char **error) {
  luna_stream s;
  li_st st;
  size_t need;
  const char *wrong = li_stream_describe(&s, &st, bytes, size, config, &need);
  if (error) *error = wrong ? wrong : "";
  if (wrong) return 0;
  return need + (LI_ALIGN - 1);
}

LUNA_API luna_stream *luna_stream_open_bytes(const void *bytes, size_t size, const luna_stream_config *config,
                                             void *memory, size_t memory_size, const char **error) {
  luna_stream first, *s = NULL;
  li_st st;
  const size_t shift = (LI_ALIGN - (uintptr_t)memory % LI_ALIGN) % LI_ALIGN;
  size_t need;
  const char *wrong = li_stream_describe(&first, &st, bytes, size, config, &need);
  if (!wrong && (!memory || memory_size < shift || memory_size - shift < need)) {
    wrong = "memory_size is less than luna_stream_size";
    if (memory && memory_size >= 100) { /* Then memory holds the message. */
      li_print((char *)memory, 100, "memory_size is %d, and luna_stream_size %d", (int64_t)memory_size,
               (int64_t)(need + (LI_ALIGN - 1)));
      wrong = (const char *)memory;
    }
  }

  if (!wrong) {
    s = li_stream_place(&first, (char *)memory + shift, need);
    wrong = li_st_index(&st, (uint64_t *)(void *)s->bump.part[1].start, NULL);
  }
  if (!wrong && !li_stream_fill(s, NULL, &st)) wrong = s->ctx.error;
  if (error) *error = wrong ? wrong : "";

  if (wrong) return NULL;
  return s;
}

LI_FN luna_status li_stream_report(luna_ctx *ctx, const luna_stream *s, const char *name) {
  if (s->ctx.status != LUNA_OK && ctx->status == LUNA_OK) luna_fail(ctx, s->ctx.status, s->ctx.error);
  return li_backend_result(ctx, name, s->ctx.status);
}
LI_FN luna_stream *li_stream_opened(luna_ctx *ctx, luna_stream *s, bool good, const char *name) {
  if (good) return s;
  (void)li_stream_report(ctx, s, name);
  luna_stream_close(s);
  return NULL;
}

/* Makes a stream from the model in `first` and a model's layers. Its memory comes from the context's allocator and, for
   a model on a device, from the device. */
LI_FN luna_stream *li_stream_make(luna_ctx *ctx, luna_stream *first, const luna_stream_config *config,
                                  const void *layers, const char *name) {
  const luna_op_kind kind = first->model.config.layer.forget ? LUNA_OP_FORGETTING_LUNA : LUNA_OP_CAUSAL_LUNA;
  luna_stream_config own;
  size_t size = 0;
  char *raw = NULL;
  bool good = true;
  memset(&own, 0, sizeof own);
  if (config) own = *config;
  if (own.isa == LUNA_ISA_BEST) own.isa = ctx->options.isa;
  if (own.weights == LUNA_DTYPE_F32) own.weights = ctx->options.weights;
  first->horizon = li_params_horizon(first->model.params, 0);
  first->model_ctx = ctx;
  first->ctx.backend = ctx->backend;
  first->ctx.self = ctx->self;
  first->ctx.state = ctx->state;
  first->ctx.options.allocator = ctx->options.allocator;
  first->ctx.options.log = ctx->options.log;
  first->ctx.options.log_user = ctx->options.log_user;
  const char *wrong = ctx->options.measure ? "a context that measures has no weights" : li_stream_config(first, &own);
  if (wrong) li_fail_status(ctx, LUNA_ERROR_STREAM_CONFIG, name, wrong);
  else if (li_on_device(&first->ctx) && !ctx->backend->op[kind].forward)
    li_fail_status(ctx, LUNA_ERROR_NO_OP, name, luna_op_name(kind));
  else if (!li_stream_measure(first, layers)) li_stream_report(ctx, first, name);
  else {
    size = li_stream_lay_out(first, NULL);
    first->memory_size = size + LI_ALIGN;
    if (ctx->options.block) li_fail_status(ctx, LUNA_ERROR_STREAM_BLOCK, name, (int64_t)first->memory_size);
    else if ((raw = (char *)li_raw_allocate(&ctx->options.allocator, first->memory_size)) == NULL)
      li_fail_memory(ctx, name, first->memory_size);
  }

  if (!raw) return NULL;
  luna_stream *s = (luna_stream *)(void *)(raw + (LI_ALIGN - (uintptr_t)raw % LI_ALIGN));
  ((char *)s)[-1] = (char)((char *)s - raw); /* 1..64 leads back to the allocation. */
  if (li_on_device(&first->ctx)) {
    first->device_memory = (char *)ctx->backend->allocate(ctx->self, first->device_size);
    if (!first->device_memory) good = li_fail_memory(ctx, name, first->device_size) == LUNA_OK;
  }

  s = li_stream_place(first, s, size);
  if (!li_on_device(&s->ctx)) s->ctx.state = &s->step_state;
  if (good) luna_stream_reset(s);
  return li_stream_opened(ctx, s, good && li_stream_fill(s, layers, NULL), name);
}

LUNA_API luna_stream *luna_stream_open(const luna_lm *model, const luna_stream_config *config) {
  luna_stream first;
  luna_ctx *ctx = li_ctx_of(model ? model->params : NULL);
  if (!ctx) return NULL;
  if (!li_is_luna(&model->config.layer)) {
    li_fail_status(ctx, LUNA_ERROR_STREAM_ATTENTION);
    return NULL;
  }

  if (li_backend_result(ctx, __func__, li_wait_for_owners(ctx)) != LUNA_OK) return NULL;
  memset(&first, 0, sizeof first);
  first.model = *model;
  first.model.config.layer.recompute = LUNA_RECOMPUTE_NONE;
  return li_stream_make(ctx, &first, config, model->layers, __func__);
}

LUNA_API void luna_stream_close(luna_stream *s) {
  if (!s || !s->memory_size) return; /* The memory may be the caller's. */
  const luna_allocator allocator = s->ctx.options.allocator;
  if (s->kept) s->ctx.backend->forget(s->ctx.self, s->kept);
  if (s->device_memory) s->ctx.backend->release(s->ctx.self, s->device_memory, s->device_size);
  /* li_stream_make left the distance in that byte. */
  li_raw_release(&allocator, (char *)s - ((char *)s)[-1], s->memory_size);
}

/* --- Running --- */
/* Counts the sequences with a row of features that do not fit. */
LI_FN int64_t li_stream_misfits(const luna_stream *s, const luna_input *input) {
  const int64_t k = s->model.config.features, row = li_size(input->n) * k;
  int64_t misfits = 0;
  for (int64_t b = 0, i; b < s->batch; b++) {
    for (i = 0; i < row; i++)
      if (!li_feature_fits(li_stream_feature(s, input->features[b * row + i], i % k))) break;
    misfits += i < row;
  }
  return misfits;
}

LI_FN luna_error_id li_stream_wrong(luna_stream *s, const luna_input *input) {
  const int64_t n = li_size(input->n), k = s->model.config.features;
  if (input->n < 1) return LUNA_ERROR_STREAM_NO_STEPS;
  if (k > 0 && !input->features) return LUNA_ERROR_STREAM_NO_FEATURES;
  if (k == 0 && !input->tokens) return LUNA_ERROR_STREAM_NO_TOKENS;
  if (li_checked(li_checked(n, s->batch), k + 1) < 0) return LUNA_ERROR_STREAM_TOO_MANY_TOKENS;

  for (int64_t i = 0; k == 0 && i < n * s->batch; i++)
    if (input->tokens[i] < 0 || input->tokens[i] >= s->model.config.vocab) {
      li_print(s->ctx.error, sizeof s->ctx.error, "%s: tokens[%d] is %d, vocab is %d",
               li_sentence_of(LUNA_ERROR_STREAM_TOKEN), i, (int64_t)input->tokens[i], s->model.config.vocab);
      return LUNA_ERROR_STREAM_TOKEN;
    }
  if (s->model.config.positions == LUNA_POSITIONS_LEARNED && s->position + n > s->model.config.max_length)
    return LUNA_ERROR_STREAM_POSITIONS;

  return LUNA_ERROR_NONE;
}

LUNA_API const float *luna_stream_prefill(luna_stream *s, const luna_input *input) {
  luna_tensor *y = NULL;
  bool finite = true;
  if (!s || li_stream_status(s) != LUNA_OK) return NULL;
  if (!input || input->lengths || (input->batch != 0 && input->batch != s->batch)) s->error = LUNA_ERROR_STREAM_INPUT;
  else s->error = li_stream_wrong(s, input);
  if (s->error != LUNA_ERROR_NONE) return NULL;

  const int64_t n = li_size(input->n);
  const int64_t misfits = li_stream_misfits(s, input);
  if (misfits > 0) s->error = LUNA_ERROR_STREAM_FEATURE;
  if (misfits > 0 && (misfits == s->batch || n > 1)) return NULL;
  for (int64_t at = 0, rows; at < n; at += rows) {
    const bool single = n == 1 && s->ctx.backend->token;
    rows = li_min(s->chunk, n - at);
    if (single) s->ctx.backend->token(&s->ctx, &s->kept, false);
    y = li_stream_send(s, input, at, rows) ? li_stream_rows(s, rows, at + rows == n) : NULL;
    if (single) s->ctx.backend->token(&s->ctx, &s->kept, true);
    s->position += rows;
    if (y && at + rows < n && !li_on_device(&s->ctx)) finite = finite && li_are_finite(luna_count(y), y->data);
  }

  if (y) (void)li_stream_move(s, s->logits, y->data, li_bytes(luna_count(y)), 2);
  if (li_stream_status(s) != LUNA_OK || !y) return NULL;
  for (int64_t i = 0, k = s->model.config.outputs; s->model.config.output_norm && i < luna_count(y); i++)
    s->logits[i] = s->logits[i] * s->output_norm[k + i % k] + s->output_norm[i % k];
  finite = finite && li_are_finite(luna_count(y), s->logits);
  if (misfits > 0) s->error = LUNA_ERROR_STREAM_FEATURE;
  else if (!finite) s->error = LUNA_ERROR_STREAM_NOT_FINITE;

  return s->logits;
}
LUNA_API const float *luna_stream_step(luna_stream *s, const int32_t *tokens) {
  const luna_input one = { tokens, NULL, 0, 1, NULL };
  return luna_stream_prefill(s, &one);
}
LUNA_API const float *luna_stream_step_features(luna_stream *s, const float *features) {
  const luna_input one = { NULL, NULL, 0, 1, features };
  return luna_stream_prefill(s, &one);
}
LUNA_API luna_error_id luna_stream_error_id(const luna_stream *s) { return s ? s->error : LUNA_ERROR_NO_STREAM; }
LUNA_API const char *luna_stream_error(const luna_stream *s) {
  if (s && (s->error == LUNA_ERROR_BACKEND || s->error == LUNA_ERROR_STREAM_TOKEN))
    return s->ctx.error;
  return li_sentence_of(luna_stream_error_id(s));
}
LUNA_API int64_t luna_stream_position(const luna_stream *s) { return s ? s->position : 0; }

/* --- Saved states --- */
LI_FN luna_status li_stream_fail(luna_stream *s, luna_error_id error) {
  if (s) s->error = error;
  return LUNA_BAD_ARGUMENT;
}

LUNA_API luna_status luna_stream_reorder(luna_stream *s, const int32_t *from) {
  if (!s || !from) return li_stream_fail(s, LUNA_ERROR_STREAM_ORDER);
  const size_t bytes = (size_t)s->batch * sizeof(int32_t);
  for (int64_t b = 0; b < s->batch; b++)
    if (from[b] < 0 || from[b] >= s->batch) return li_stream_fail(s, LUNA_ERROR_STREAM_ORDER);
  int32_t *order = li_stream_inputs(s, s->host_inputs, 1).tokens;
  li_copy(order, from, bytes);
  if (s->inputs == s->host_inputs || li_stream_move(s, li_stream_inputs(s, s->inputs, 1).tokens, order, bytes, 1))
    (void)li_stream_reorder_all(s);
  return li_stream_status(s);
}

/* A saved state begins with a mark, batch, position and, to identify the model, its config's whole numbers. */
#define LI_STREAM_MARK 0x316D61657274736C /* "lstream1" in native order */
typedef struct li_stream_head {
  int64_t mark, batch, position, sizes[LI_LENGTH(li_fields)];
  size_t bytes; /* Bytes that are saved */
} li_stream_head;
LI_FN li_stream_head li_stream_head_of(int64_t batch, int64_t position, const luna_lm_config *config) {
  li_stream_head head = { LI_STREAM_MARK, batch, position, { 0 }, offsetof(li_stream_head, sizes) };
  int count = 0;
  /* Before 1.0, each mean began at a multiple of 64 bytes. If that gave another layout, the mark is now "lstream2". */
  if (batch * config->layer.dim * config->layer.memory % 8) head.mark += (int64_t)1 << 56;
  for (const li_field *f = NULL; (f = li_field_next(f, LI_OF_LM)) != NULL;)
    if (!f->fraction) head.sizes[count++] = li_field_get(f, LI_OF_LM, config);
  head.bytes += (size_t)count * sizeof head.sizes[0];
  return head;
}
/* Returns a saved state's position, or -1 if it is damaged or belongs to another model or batch. */
LI_FN int64_t li_stream_head_read(const void *bytes, int64_t batch, const luna_lm_config *config) {
  int64_t position;
  memcpy(&position, (const char *)bytes + offsetof(li_stream_head, position), sizeof position);
  const li_stream_head like = li_stream_head_of(batch, position, config);
  if (position <= (int64_t)1 << 53 && memcmp(bytes, &like, like.bytes) == 0) return position;
  return -1;
}

LUNA_API size_t luna_stream_state_size(const luna_stream *s) {
  if (s) return li_stream_head_of(0, 0, &s->model.config).bytes + s->state_size;
  return 0;
}
LUNA_API luna_status luna_stream_state_save(const luna_stream *s, void *bytes, size_t size) {
  if (!s || !bytes || size < luna_stream_state_size(s)) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = (luna_ctx *)(uintptr_t)&s->ctx;
  const li_stream_head head = li_stream_head_of(s->batch, s->position, &s->model.config);
  memcpy(bytes, &head, head.bytes);
  if (ctx->status != LUNA_OK) return ctx->status;
  return ctx->backend->copy(ctx, (char *)bytes + head.bytes, s->state, s->state_size, 2);
}
LUNA_API luna_status luna_stream_state_load(luna_stream *s, const void *bytes, size_t size) {
  if (!s || !bytes || size != luna_stream_state_size(s)) return li_stream_fail(s, LUNA_ERROR_STREAM_STATE_SIZE);
  const int64_t position = li_stream_head_read(bytes, s->batch, &s->model.config);
  if (position < 0) return li_stream_fail(s, LUNA_ERROR_STREAM_STATE);
  if (li_stream_move(s, s->state, (const char *)bytes + (size - s->state_size), s->state_size, 1))
    s->position = position;
  return li_stream_status(s);
}

/* --- A state that training carries has two halves. A step reads one, which its backward pass reads again, and writes
   the other, which the next step continues. --- */
struct luna_lm_state {
  luna_params *params;
  luna_lm_config config;
  int64_t batch;
  size_t size, layer_size; /* Bytes: half, layer */
  char *half[2];
  int64_t *position[2]; /* [batch] */
  int now;      /* The half to continue */
  bool written; /* The other half is written. */
};
LI_FN li_past li_state_at(const luna_lm_state *s, char *base, size_t *used) {
  li_past past;
  memset(&past, 0, sizeof past);
  li_past_take(&past, &s->config.layer, s->batch, base, used);
  return past;
}
/* Returns a layer's state in the half to write; `before` leads from there to the half to read. */
LI_FN li_past li_state_layer(luna_lm_state *s, int64_t layer) {
  size_t used = 0;
  li_past past;
  if (!s) return memset(&past, 0, sizeof past), past;
  past = li_state_at(s, s->half[!s->now] + (size_t)layer * s->layer_size, &used);
  past.position = s->position[s->now];
  past.before = (s->half[s->now] - s->half[!s->now]) / (ptrdiff_t)sizeof(double);
  return past;
}
LI_FN int64_t li_state_position(const luna_lm_state *s) { return s ? (int64_t)s->position[s->now][0] : 0; }
LI_FN bool li_state_even(const luna_lm_state *s, const int64_t *position) {
  for (int64_t b = 1; b < s->batch; b++)
    if (position[b] != position[0]) return false;
  return true;
}
LI_FN luna_lm_state *li_state_carried(const luna_lm *model) {
  luna_lm_state *s = model->params->ctx->carried;
  if (s && s->params == model->params) return s;
  return NULL;
}
/* Marks the other half of a carried state as written, `rows` rows on. Returns x. */
LI_FN luna_tensor *li_state_written(const luna_lm *model, luna_tensor *x, int64_t rows) {
  luna_lm_state *s = li_state_carried(model);
  if (!s || !x || rows == 0) return x; /* Ops on no rows write nothing. */
  for (int64_t b = 0; b < s->batch; b++) s->position[!s->now][b] = s->position[s->now][b] + rows;
  s->written = true;
  return x;
}
/* Finds the state that a forward call continues, or null. Returns false if it does not suit the call. */
LI_FN bool li_state_take(const luna_lm *model, const luna_input *input, luna_lm_state **state) {
  static const char name[] = "luna_lm_forward";
  luna_ctx *ctx = model->params->ctx;
  luna_lm_state *s = *state = li_state_carried(model);
  if (!s) return true;
  if (s->written) return li_refuse(ctx, LUNA_ERROR_STATE_TWICE, name);
  if (input->batch != s->batch || input->lengths)
    return li_refuse(ctx, LUNA_ERROR_STATE_INPUT, name, s->batch, input->batch,
                      input->lengths ? "lengths" : "no lengths");
  return model->config.positions == LUNA_POSITIONS_NONE || li_state_even(s, s->position[s->now]) ||
         li_refuse(ctx, LUNA_ERROR_STATE_POSITIONS, name, "an embedding of positions");
}

LUNA_API luna_lm_state *luna_lm_state_open(const luna_lm *model, int64_t batch) {
  luna_ctx *ctx = li_ctx_of(model ? model->params : NULL);
  size_t layer_size = 0;
  li_past none;
  if (!ctx) return NULL;

  const luna_layer_config *c = &model->config.layer;
  if (!li_is_luna(c) || li_on_device(ctx) || ctx->options.isa == LUNA_ISA_REFERENCE ||
      (c->attention_dropout > 0 && !c->forget)) {
    li_fail_status(ctx, LUNA_ERROR_STATE_MODEL, __func__);
    return NULL;
  }

  const int64_t each = li_checked(li_checked(model->config.layers, c->dim), 24 * c->memory + 4 * c->convolution);
  if (!li_in(ctx, __func__, "batch", batch, 1, each > 0 ? LI_MAX_COUNT / each : 1)) return NULL;
  li_past_take(&none, c, batch, NULL, &layer_size);
  const size_t layers = layer_size * (size_t)model->config.layers, head = li_round(sizeof(luna_lm_state));
  const size_t size = li_round(layers + (size_t)batch * sizeof(int64_t));
  char *at = (char *)li_persist_host(ctx, __func__, head + 2 * size + LI_ALIGN);
  if (!at) return NULL;

  luna_lm_state *s = (luna_lm_state *)(void *)at;
  s->config = model->config;
  s->params = model->params;
  s->batch = batch;
  s->size = size;
  s->layer_size = layer_size;
  at += head + (LI_ALIGN - (uintptr_t)(at + head) % LI_ALIGN) % LI_ALIGN;
  for (int i = 0; i < 2; i++) {
    s->half[i] = at + (size_t)i * size;
    s->position[i] = (int64_t *)(void *)(s->half[i] + layers);
  }

  if (!model->params->state) model->params->state = s;
  return s;
}
LI_FN int li_state_newest(const luna_lm_state *s) {
  if (s->written && !li_step_failed(s->params->ctx)) return !s->now;
  return s->now;
}
/* Ends the step that continues the state. */
LI_FN void li_state_turn(luna_lm_state *s) {
  s->now = li_state_newest(s);
  s->written = false;
}
LUNA_API luna_status luna_lm_state_continue(luna_lm_state *s) {
  if (!s) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = s->params->ctx;
  if (ctx->carried) return li_fail_status(ctx, LUNA_ERROR_STATE_TWICE, __func__);
  if (ctx->training) s->params->state = s;
  ctx->carried = s;
  return LUNA_OK;
}

LUNA_API luna_status luna_lm_state_restart(luna_lm_state *s, const int32_t *sequences, int64_t count) {
  if (!s) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = s->params->ctx;
  if (ctx->carried == s) return li_fail_status(ctx, LUNA_ERROR_STATE_TWICE, __func__);
  if (!sequences) count = s->batch;

  for (int64_t i = 0; sequences && i < count; i++)
    if (sequences[i] < 0 || sequences[i] >= s->batch)
      return li_fail_status(ctx, LUNA_ERROR_ELEMENT_RANGE, __func__, "sequences", i, (int64_t)sequences[i], (int64_t)0,
                            s->batch - 1);
  for (int64_t i = 0; i < count; i++) {
    const int64_t b = sequences ? sequences[i] : i;
    s->position[s->now][b] = 0;
    for (int64_t layer = 0; layer < s->config.layers; layer++) {
      size_t used = 0;
      const li_past past = li_state_at(s, s->half[s->now] + (size_t)layer * s->layer_size, &used);
      for (int k = 0; k < LI_STATE_PARTS; k++) {
        const li_state_part part = li_state_part_of(&past, &s->config.layer, s->batch, k);
        memset((char *)part.at + (size_t)b * part.bytes, 0, part.bytes);
      }
    }
  }

  return LUNA_OK;
}
LI_FN float *li_state_bytes(const luna_lm_state *s, luna_tensor *like) {
  const int64_t count = (int64_t)(s->size / sizeof(float));
  *like = li_like(s->params->ctx, 1, &count);
  return (float *)(void *)s->half[li_state_newest(s)];
}
/* Checks that the positions in a stored half are possible. */
LI_FN bool li_state_places(const luna_lm_state *s, const li_st_tensor *bytes) {
  for (int64_t b = 0; b < s->batch; b++) {
    li_st_tensor part = *bytes;
    float words[2];
    int64_t position;
    part.data += (const char *)(s->position[0] + b) - s->half[0];
    part.count = 2;
    part.bytes = sizeof words;
    li_st_floats(&part, words);
    memcpy(&position, words, sizeof position);
    if (position < 0 || position > (int64_t)1 << 53) return false;
  }
  return true;
}
LUNA_API size_t luna_lm_state_size(const luna_lm_state *s) {
  if (s) return li_stream_head_of(0, 0, &s->config).bytes + s->layer_size * (size_t)s->config.layers;
  return 0;
}

LUNA_API luna_status luna_lm_state_save(const luna_lm_state *s, void *bytes, size_t size) {
  if (!s) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = s->params->ctx;
  const int newest = li_state_newest(s);
  const int64_t *positions = s->position[newest];
  const size_t need = luna_lm_state_size(s);
  int64_t farthest = 0; /* The farthest stands for all: an unread forgetting memory is zero at any position. */
  if (!bytes) return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "bytes");
  if (size < need) return li_fail_status(ctx, LUNA_ERROR_SAVE_BUFFER, __func__, (int64_t)size, (int64_t)need);
  if ((!s->config.layer.forget || s->config.positions > LUNA_POSITIONS_NONE) && !li_state_even(s, positions))
    return li_fail_status(ctx, LUNA_ERROR_STATE_POSITIONS, __func__, "a stream");

  for (int64_t b = 0; b < s->batch; b++) farthest = li_max(farthest, positions[b]);
  const li_stream_head head = li_stream_head_of(s->batch, farthest, &s->config);
  memcpy(bytes, &head, head.bytes);
  memcpy((char *)bytes + head.bytes, s->half[newest], need - head.bytes);
  return LUNA_OK;
}
LUNA_API luna_status luna_lm_state_load(luna_lm_state *s, const void *bytes, size_t size) {
  if (!s) return LUNA_BAD_ARGUMENT;
  luna_ctx *ctx = s->params->ctx;
  const size_t state = s->layer_size * (size_t)s->config.layers;
  int64_t position = -1;
  if (!bytes) return li_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, __func__, "bytes");
  if (ctx->carried == s) return li_fail_status(ctx, LUNA_ERROR_STATE_TWICE, __func__);
  if (size == luna_lm_state_size(s)) position = li_stream_head_read(bytes, s->batch, &s->config);
  if (position < 0) return li_fail_status(ctx, LUNA_ERROR_STATE_OTHER, __func__);
  memcpy(s->half[s->now], (const char *)bytes + (size - state), state);
  for (int64_t b = 0; b < s->batch; b++) s->position[s->now][b] = position;
  return LUNA_OK;
}

/* ----------------
   >>sampling: luna_sample draws a token from logits. top_k becomes a limit, and logits below it do not count. Then one
   random number chooses among the others. Guarded by tests/models/stream.c.
   ---------------- */
/* Finds the k-th largest of n numbers, and how many are larger than it. A pass finds the next lower number, and how
   often it occurs. */
LI_HOT float li_kth(const float *x, int64_t n, int64_t k, int64_t *above) {
  float limit = INFINITY, next = -INFINITY;
  int64_t count = 0, equal = 0, i;
  for (*above = 0; count < k; count += equal) {
    *above = count;
    for (next = -INFINITY, equal = 0, i = 0; i < n; i++) {
      if (x[i] < limit && x[i] > next) { next = x[i]; equal = 0; }
      equal += x[i] == next && x[i] < limit;
    }
    if (equal == 0) break;
    limit = next;
  }
  return limit;
}

LI_HOT double li_weight(float logit, float max, float temperature) {
  return (double)li_exp1_scalar((logit - max) / temperature);
}

LUNA_API int32_t luna_sample(const float *logits, int64_t vocab, luna_sampling *sampling) {
  const luna_sampling greedy = { 0, 0, 0, 0 }, *s = sampling ? sampling : &greedy;
  const float temperature = s->temperature;
  const int64_t n = li_size(vocab), k = s->top_k != 0 && s->top_k < n ? s->top_k : n;
  int64_t above = 0;
  uint32_t counter[4] = { (uint32_t)s->drawn, (uint32_t)(s->drawn >> 32), 0x53616D70u, 0 }, word[4]; /* "Samp" */
  float limit = -INFINITY, max = -INFINITY;
  double target = (double)INFINITY;
  int32_t chosen = -1;
  if (!logits || n < 1 || n > INT32_MAX || k < 1 || !(temperature >= 0 && li_is_finite(temperature))) return -1;

  for (int64_t i = 0; i < n; i++) {
    if (logits[i] != logits[i]) return -1;
    if (logits[i] > max || chosen < 0) { max = logits[i]; chosen = (int32_t)i; }
  }
  if (k == 1 || temperature == 0 || max == -INFINITY || max == INFINITY) return chosen;
  if (k < n) limit = li_kth(logits, n, k, &above);

  li_philox(counter, s->seed, word);
  sampling->drawn++;
  /* The first pass sums, the second finds the place in the sum. Of logits equal to the limit, the first few count. */
  for (int pass = 0; pass < 2; pass++) {
    double sum = 0;
    for (int64_t ties = k - above, i = 0; i < n; i++) {
      if (logits[i] < limit || (k < n && logits[i] == limit && ties-- <= 0)) continue;
      sum += li_weight(logits[i], max, temperature);
      if (sum > target) return (int32_t)i;
    }
    target = sum * ((double)word[0] + 0.5) / 4294967296.0;
  }

  return chosen;
}

/* ----------------
   >>decoder: a decoder's stream, and greedy decoding. The stream is a language model's with `cross`, and li_past has
   the tensors from its sources. Guarded by tests/models/translation.c.
   ---------------- */
/* Computes a decoder layer's tensors from its sources: scores from P, keys and values from Y_P. *p becomes the next
   layer's P. */
LI_FN bool li_stream_sources(luna_stream *s, const luna_decoder_layer *layer, li_stream_layer *own,
                             luna_tensor **p, luna_tensor *context, const int32_t *lengths) {
  const luna_nested_attention_layer *cross = &layer->cross_attention;
  const luna_layer_config *c = &layer->config;
  luna_tensor *packed_context = li_nested_pack(cross, li_normed(c, *p, &layer->memory_norm), context, lengths);
  if (!li_stream_fold(s, own, (*p)->data)) return false;
  luna_tensor *v = luna_linear_layer_forward(&cross->v, packed_context), *k = v;
  if (cross->config.sharing != LUNA_SHARING_TIED && packed_context) k = li_project(&cross->k, packed_context);
  *p = li_residual(c, *p, packed_context, &layer->memory_norm);
  return *p && li_stream_store(s, own->past.keys.data, k) && li_stream_store(s, own->past.values.data, v);
}
/* Writes each sequence's number of memory slots. `count` sequences share the sources equally. */
LI_FN bool li_stream_real(luna_stream *s, int32_t *to, int64_t count, const luna_input *source) {
  int32_t *slots = li_on_device(&s->ctx) ? li_stream_inputs(s, s->host_inputs, 1).tokens : to;
  for (int64_t i = 0; i < count; i++) {
    const int64_t length = source->lengths ? source->lengths[i * s->sources / count] : source->n;
    slots[i] = (int32_t)li_min(length, s->model.config.layer.memory);
  }
  return slots == to || li_stream_move(s, to, slots, (size_t)count * sizeof(int32_t), 1);
}

/* Encodes the sources, then opens a stream that decodes each one in `beam` sequences. To li_stream_make, which takes
   `first`, the decoder is a language model with `cross`. Then the layers' tensors from the sources are stored. */
LI_FN luna_stream *li_seq2seq_stream(const luna_seq2seq *model, const luna_input *source, int64_t beam,
                                     const char *name) {
  luna_ctx *ctx = model->params->ctx;
  const luna_seq2seq_config *c = &model->config;
  const luna_encoder_config *e = &c->encoder;
  luna_stream first;
  luna_stream_config config;
  luna_lm_config *decoder = &first.model.config;
  luna_tensor *p = NULL;
  luna_begin_inference(ctx);
  if (!li_encoder_ctx(&model->encoder, source, name, "source") ||
      !li_in(ctx, name, "source->batch", source->batch, 1, LI_MAX_COUNT) ||
      !li_in(ctx, name, "beam", beam, 1, LI_MAX_COUNT / source->batch)) return NULL;
  luna_tensor *context = luna_encoder_forward(&model->encoder, source, &p);
  if (!context) return NULL;

  memset(&first, 0, sizeof first);
  memset(&config, 0, sizeof config);
  config.batch = source->batch * beam;
  config.chunk = 1;
  decoder->layer = e->layer;
  decoder->layer.memory = p->shape[1];
  decoder->vocab = decoder->outputs = c->target_vocab;
  decoder->layers = c->decoder_layers;
  decoder->positions = e->positions;
  decoder->max_length = c->max_target_length;
  first.sources = source->batch;
  first.cross = true;
  first.scale = li_embedding_factor(e);
  first.first_position = e->first_position;
  first.model.params = model->params;
  first.model.embedding = model->embedding;
  first.model.positions = model->positions;
  first.model.norm = model->norm;
  first.model.output.weight = model->output;
  luna_stream *s = li_stream_make(ctx, &first, &config, model->layers, name);
  if (!s) return NULL;

  bool good = li_stream_real(s, s->slots, s->batch, source) &&
              li_stream_real(s, s->source_slots, source->batch, source);
  for (int64_t i = 0; good && i < s->model.config.layers; i++)
    good = li_stream_sources(s, &model->layers[i], &s->layers[i], &p, context, source->lengths);
  return li_stream_opened(ctx, s, good, name);
}
LUNA_API luna_stream *luna_seq2seq_stream_open(const luna_seq2seq *model, const luna_input *source, int64_t beam) {
  if (!model || !model->params) return NULL;
  return li_seq2seq_stream(model, source, beam == 0 ? 1 : beam, __func__);
}

/* Decodes greedily: each sequence gets its likeliest token until all have ended. Rows of `out` are `stride` apart. */
LI_FN luna_status li_decode(luna_ctx *ctx, luna_stream *s, const luna_generate_config *c, int64_t stride, int32_t *out,
                            int32_t *out_lengths) {
  static const char name[] = "luna_seq2seq_generate";
  const int64_t vocab = s->model.config.vocab;
  int32_t *last = li_stream_inputs(s, s->host_inputs, 1).tokens; /* A step's tokens */
  int64_t going = s->batch;

  for (int64_t b = 0; b < s->batch; b++) {
    last[b] = c->begin;
    out_lengths[b] = 0;
  }

  for (int64_t length = 0; going > 0 && length < c->max_length; length++) {
    const float *logits = luna_stream_step(s, last);
    if (!logits && s->ctx.status != LUNA_OK) return li_stream_report(ctx, s, name);
    if (!logits) return li_fail_status(ctx, LUNA_ERROR_STREAM_CONFIG, name, luna_stream_error(s));
    going = 0;
    for (int64_t b = 0; b < s->batch; b++) {
      if (out_lengths[b] < length) continue;
      last[b] = luna_sample(logits + b * vocab, vocab, NULL);
      if (last[b] < 0 || !li_is_finite(logits[b * vocab + last[b]]))
        return li_fail_status(ctx, LUNA_ERROR_LOGITS_NOT_FINITE, b);
      if (last[b] == c->end) continue;
      out[b * stride + length] = last[b];
      out_lengths[b]++;
      going++;
    }
  }

  return LUNA_OK;
}

LUNA_API luna_status luna_seq2seq_generate(const luna_seq2seq *model, const luna_input *source,
                                           const luna_generate_config *config, int32_t *out, int32_t *out_lengths) {
  const char *name = __func__;
  luna_ctx *ctx = li_ctx_of(model ? model->params : NULL);
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (!li_is_given(ctx, name, "source", source != NULL) ||
      !li_is_given(ctx, name, "config, out or out_lengths", config && out && out_lengths)) return ctx->last_status;

  luna_generate_config c = *config;
  const int64_t vocab = model->config.target_vocab;
  if (c.max_length == 0) c.max_length = li_checked(2, source->n) + 10; /* Negative n fails below. */
  const int64_t stride = c.max_length;
  if (model->positions) c.max_length = li_min(c.max_length, model->config.max_target_length - 1);
  if (!li_in(ctx, name, "source->batch", source->batch, 1, LI_MAX_COUNT) ||
      !li_in(ctx, name, "source->n", source->n, 0, LI_MAX_COUNT) ||
      !li_in(ctx, name, "max_length", c.max_length, 1, LI_MAX_COUNT / source->batch) ||
      !li_in(ctx, name, "begin", c.begin, 0, vocab - 1) ||
      !li_in(ctx, name, "end", c.end, 0, vocab - 1)) return ctx->last_status;

  luna_stream *stream = li_seq2seq_stream(model, source, 1, name);
  if (!stream) return ctx->status == LUNA_OK ? LUNA_OUT_OF_MEMORY : ctx->status;
  const luna_status status = li_decode(ctx, stream, &c, stride, out, out_lengths);
  luna_stream_close(stream);

  return status;
}

#pragma pop_macro("LI_FN")
#pragma pop_macro("LUNA_API")
#if defined(__cplusplus) && defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#endif
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC pop_options
#elif defined(_MSC_VER) && !defined(__clang__)
#pragma warning(pop)
#endif
#endif /* !LI_PASS */
#endif /* LUNA_IMPLEMENTATION */
