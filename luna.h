/* luna.h - attention over long sequences, in one header. Version 0.1. MIT or public domain: see LICENSE.

   Luna (Linear Unified Nested Attention, NeurIPS 2021) replaces softmax attention's quadratic cost by two nested
   attentions through a short memory P. Equation, section and table numbers in this file are those of version 2 of the
   paper, arXiv 2106.01540v2: attention (1), Transformer layer (2), pack (3), unpack (4), Luna attention (5), Luna
   layer (6), causal function (7).

   WHAT P IS
     P is a short sequence of l vectors, 16 by default, learned like a weight and rewritten by every layer:
       X   [n,d]   x x x x x x x x x x x x   the sequence
                    \ \ \ | | | | / / /      pack:   Y_P = Attn(P, X), l queries read n tokens
       P   [l,d]          p p p p            the memory, then the packed context Y_P
                    / / / | | | | \ \ \      unpack: Y_X = Attn(X, Y_P), n queries read l slots
       Y_X [n,d]   y y y y y y y y y y y y   the next layer's X; Y_P is the next layer's P
     Both take n l dot products instead of n n: time and memory are linear in n. After the last layer P summarises the
     sequence in a fixed size: classifiers pool it, decoders read it, and it can be carried into the next segment. The
     causal form replaces the pack by running sums, and so streams one token at a time in memory that does not grow.
     A classifier that pools P (the default) does not use its last layer's unpack and feed-forward: they are not
     computed and have no gradient, and a parameter without gradient is changed by no optimiser, nor by weight decay.

   WHEN NOT TO USE IT
     When sequences are short: what Luna saves grows with n / l, and softmax attention (layer.attention =
     LUNA_ATTENTION_SOFTMAX) loses nothing. When a task must copy or find single distant tokens exactly: all that
     passes between tokens goes through l slots. When weights of a pretrained Transformer must be used: they belong to
     another function. The attentions that the papers compare with are here, so that this can be measured on your own
     data.

   HOW TO USE IT
     0. In one C or C++ file of its own:
            #define LUNA_IMPLEMENTATION
            #include "luna.h"
        Everywhere else include it alone. Link with -lm, and -lpthread where threads need it. The implementation takes
        about 7 s to compile at -O2: put it into one file (luna.c) and compile that once. There is nothing to
        configure: it holds SSE2, AVX2 and AVX-512 kernels (NEON or WASM SIMD128 where the target has them, else scalar
        ones) and picks the best at run time.
     1. Open a context: memory, threads, errors, randomness. What is made from it is freed with it.
            luna_ctx *ctx = luna_open(NULL);              null: the defaults, here and for every config below
     2. Make a model. Its parameters belong to a set and have names, by which they are trained, saved and loaded.
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
        labels[i] is the token after tokens[i], shifted by you; a negative label is ignored: give -1 to padding and
        to the last place where nothing follows. A begin, here and below, is luna_begin_step or luna_begin_inference.
        Tensors, luna_tensor_new's too, end with the next begin: make inputs after it, in the loop.
        Regression is a classifier of one class with another loss: luna_mse(y, targets), luna_huber, or, for several
        questions with yes and no, luna_binary_cross_entropy. NaN targets are ignored.
        Sequences of numbers: with .features = k in its config a model reads input.features [batch,n,k] in place of
        tokens, standardised by "input_norm.mean" and "input_norm.scale" (call luna_input_layer_fit on training data
        first; they are saved, never trained) and projected by "input_proj". NaN is a missing number and counts as its
        mean. A luna_lm of features has .outputs a step, classes or values: a detector, a forecaster. A classifier with
        .per_step has classes at each step, found from the whole sequence.
     4. Save it, use it.
            if (luna_save(params, "model.safetensors") != LUNA_OK) puts(luna_error(ctx));
            luna_begin_inference(ctx);                           no tape, no dropout; the same forward calls
            luna_close(ctx);
     5. Resume. luna_save_training writes parameters, moments, counters, learning rate and seed; after
        luna_load_training into a model and an optimiser made with the same config (schedule, betas, decay, clip,
        groups), training goes on with the bits of a run that never stopped. The position in the data is yours to
        keep: luna_params_set before, luna_params_get after. luna_load_model opens any saved model by what its file
        says, except one with an attention hook: init that with its config and hook, then luna_load.
     6. Stream, with Luna attention alone: luna_stream_open, then luna_stream_step for each token, or
        luna_stream_step_features for each step of features. Open it after training: it copies a part of the weights,
        and reads the others in place. One thread a stream, any number of streams on one model. With LUNA_ONLY_STREAM,
        luna_stream_open_bytes needs no context, allocator, stdio or threads.

   MEMORY
     Parameters, gradients and optimisers stay until luna_close. Activations live in an arena that the next begin
     empties: a steady step allocates nothing. `options.block` gives a context one block for everything; then no
     allocator is called. A context opened with `options.measure` computes nothing, and after one dry run of the same
     calls at the largest sizes, with the same threads and isa and the files that it loads, luna_memory(ctx).peak is
     the exact size of that block. Streams have memory of their own: with a block, luna_stream_open_bytes.
     Within a step, layers and models are scopes: at a scope's end the values of all tensors made in it are released,
     except its results and, in training, what backward reads (LUNA_OPS says what each op's does) and cannot compute
     again by cheap ops (norms, embeddings, activations). So an inference of many layers takes little more than one of
     two. In training some inner tensors therefore stay readable until luna_backward, but only luna_keep promises it:
     call it for hidden values to look at, or to hand out of an attention hook. Functions of your own:
     luna_scope_begin, luna_scope_end.
     luna_backward takes all the memory it needs before it changes any gradient, and releases the gradient of an op's
     result after its last use unless luna_require_grad asked for it. The gradient of the logits of more than 1024
     classes is made and used by parts where luna_cross_entropy alone reads them; luna_lm_loss does not store the
     logits either. Folded Luna layers (luna_form) keep 2 dim + ffn floats a token for backward, or 2 dim with the
     feed-forward recomputed (layer.recompute trades time for memory and changes no bit). Several rounds of begin,
     forward and luna_backward before one optimiser step accumulate.

   ERRORS
     Nothing aborts or prints, and a failed call leaves every object as it was. A failed op returns null, and ops given
     null return null. luna_ctx_status(ctx) is the status of the first failure since the last begin. luna_error(ctx)
     is a sentence that names the call, the sizes and the remedy, and luna_ctx_error_id(ctx) its id in LUNA_ERRORS, for
     programs that act on one: those of the first failure, until a call that is not an op (luna_load, an init) fails,
     which always leaves its own. One check a step is enough: after a failure luna_optimizer_step changes nothing and
     returns it. An init that fails leaves a zeroed struct, and each begin fails with it until that init succeeds. A
     forward of a zeroed model returns null; no context is known then, and no sentence, so luna_optimizer_step reports
     that there was no luna_backward. options.log gets each failure as it happens. A step whose loss or gradients are
     not finite is skipped; max_skips of them in a row are LUNA_NOT_FINITE.

   THREADS
     A context is for one thread at a time and uses a pool of its own, or options.parallel_for. Results are the same
     bits for any number of threads. Several contexts may read one set that nobody trains (luna_params_share). A
     forked child goes on with one thread.

   NUMBERS
     float32; long sums in double; FMA only where written, never inferred; exp, log, erf, sine and cosine are luna.h's
     own. Causality is exact: a token, even Inf or NaN, changes no bit of anything before it. Random numbers are
     Philox4x32-10: initial values depend on seed and parameter name, dropout on seed, step and place, the same on
     every machine.

   DEVICES
     options.backend puts values elsewhere: luna_cuda.cuh on an NVIDIA GPU. The host then reads and writes them by
     luna_read, luna_item and luna_write alone. Checkpoints and saved streams move between devices. luna_graph makes a
     training step one launch.

   OTHER ATTENTIONS, OTHER OPS
     layer.attention puts softmax, linear or Linformer attention in Luna's place, layer.hook any other, such as the
     thirteen in examples/attentions; what is around it stays the same, so that a comparison compares the mathematics.
     luna_custom_op makes an op of a forward and a backward function: saving, optimisers and clipping go by the set of
     parameters, not by the model, and work with it. luna_softmax_attention takes patterns: sliding windows, and lists
     of the keys that blocks of queries see, in time by what is seen (luna_attention_pattern; on the CPU). A window of
     256 tokens, each its past:

       luna_attention_pattern window = {0};
       window.window = true, window.left = 255;
       config.patterns = &window, config.pattern_count = 1;
     Into luna.h itself a map of single numbers goes as one row of LUNA_MAPS, an op of two or three tensors that
     broadcast as one of LUNA_BINARIES or LUNA_ELEMENTWISE: from it come the function, its gradient, the kernels of all
     instruction sets and of the device, and its tests. Any other op is a row of LUNA_OPS, an entry of each backend's
     table, a function that checks shapes and builds it, and a case in tests/op_cases.h.

   CHECKPOINTS
     safetensors, which opens in Python as it is; tensors have the names of the authors' code. __metadata__ holds
     text:
       luna.kind                  causal_lm, classifier, masked_lm or seq2seq
       luna.vocab, luna.dim, ...  the model's config by its fields' names: decimal numbers, enums by value
       luna.dropout, luna.attention_dropout, luna.activation_dropout    in units of 10^-9
       any other key              the caller's, by luna_params_set
     luna_save_training adds tensors luna.momentI.NAME (Adam: I = 1 of the gradient, 2 of its square) and, as 16
     hexadecimal digits each,
       luna.optimizer             0 SGD, 1 Adam, 2 AdamW, 3 Apollo
       luna.attempts, luna.updates, luna.skipped, luna.skipped_in_row   steps tried, made, skipped as not finite
       luna.lr                    the float's bits: the learning rate before its schedule
       luna.step, luna.seed       of the context's dropout
     Sinusoidal positions are not stored. With w_i = 10000^(-i / (d/2 - 1)), position t has sin(t w_i) at i < d/2 and
     cos(t w_i) at d/2 + i, as in fairseq. X enters as s E[token] + sinusoid, s = sqrt(d) or 1
     (config.embedding_scale), and P as s P + sinusoid.

   SWITCHES, defined before the implementation (and, for those marked *, before every include)
     LUNA_STATIC *          all functions static
     LUNA_NO_TRAIN *        no backward pass, no optimisers
     LUNA_NO_STDIO *        no files by path; luna_io and bytes in memory remain
     LUNA_NO_THREADS        no thread pool; a caller's parallel_for still works
     LUNA_NO_SIMD           scalar kernels only
     LUNA_ONLY_STREAM *     streaming a causal language model from a checkpoint in memory, and nothing else
     LUNA_MALLOC, LUNA_FREE the default allocator; define both or neither
     LUNA_ASSERT(c)         checks internal invariants; default: nothing
     LUNA_API               prefix of public functions
     LUNA_HEADER_FILENAME   what luna.h includes itself by, "luna.h" unless it was renamed

   CONTENTS (search for the tag)
     1. Public API        >>status >>errors >>functions >>context >>tensors >>ops >>params >>checkpoints >>layers
                          >>models >>trainer >>stream >>backend
     2. Implementation    >>base >>kernels >>vector >>gemm >>elementwise >>attention >>causal >>dispatch >>functions
                          >>safetensors >>threads >>context >>backend >>tensors >>graphs >>params >>ops >>layers
                          >>models >>trainer >>checkpoints >>stream */

#ifndef LUNA_H
#define LUNA_H

/* =====================================================================================================================
   1. Public API
   ================================================================================================================== */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LUNA_VERSION "0.1"
#define LUNA_VERSION_NUMBER 100      /* 10000 major + 100 minor + patch */

#ifndef LUNA_API
#if defined(LUNA_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define LUNA_API static __attribute__((unused))
#elif defined(LUNA_STATIC)
#define LUNA_API static
#elif defined(__cplusplus)
#define LUNA_API extern "C"
#else
#define LUNA_API extern
#endif
#endif

/* streams run the layers: what these are made of is private, and what streams do not use is left out */
#ifdef LUNA_ONLY_STREAM
#if defined(__GNUC__) || defined(__clang__)
#define LUNAI_PRIVATE static __attribute__((unused))
#else
#define LUNAI_PRIVATE static
#endif
#undef LUNA_NO_TRAIN
#define LUNA_NO_TRAIN
#undef LUNA_NO_STDIO
#define LUNA_NO_STDIO
#undef LUNA_NO_THREADS
#define LUNA_NO_THREADS
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>status
   ------------------------------------------------------------------------------------------------------------------ */
typedef enum luna_status {
  LUNA_OK = 0,
  LUNA_BAD_ARGUMENT,                 /* invalid argument */
  LUNA_OUT_OF_MEMORY,                /* the allocator or the block has no more */
  LUNA_BAD_FILE,                     /* the bytes are not a valid file of this kind */
  LUNA_CANNOT_READ,                  /* the file is missing or unreadable */
  LUNA_CANNOT_WRITE,                 /* the file could not be written; an older one is untouched */
  LUNA_MISMATCH,                     /* names or shapes of a file and of a parameter set differ */
  LUNA_UNSUPPORTED,                  /* this build, machine or backend does not have it */
  LUNA_DEVICE_FAILED,                /* a device call failed, or work queued on it earlier did */
  LUNA_NOT_FINITE                    /* too many optimiser steps in a row had a NaN or Inf in the loss or a gradient */
} luna_status;
LUNA_API const char *luna_status_text(luna_status status);
LUNA_API int luna_version(void);     /* LUNA_VERSION_NUMBER of the implementation */

/* ---------------------------------------------------------------------------------------------------------------------
   >>errors: X(ID, STATUS, sentence), each LUNA_ERROR_ID with its LUNA_STATUS. In sentences %s is text (the first is the
   function), %d and %f are numbers, %t is a tensor's shape. The first list is of streams, whose sentences are fixed.
   Numbers of ids may change with the version.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNA_STREAM_ERRORS(X) \
  X(NO_STREAM, BAD_ARGUMENT, "the stream is null: opening it failed") \
  X(STREAM_NO_TOKENS, BAD_ARGUMENT, "luna_stream_step, luna_stream_step_features or luna_stream_prefill: there are " \
    "no tokens or, of a model of features, no features") \
  X(STREAM_TOO_MANY_TOKENS, BAD_ARGUMENT, "luna_stream_prefill: n is too large") \
  X(STREAM_TOKEN, BAD_ARGUMENT, \
    "luna_stream_step or luna_stream_prefill: a token is not in 0..vocab - 1; none was read") \
  X(STREAM_POSITIONS, BAD_ARGUMENT, "luna_stream_step or luna_stream_prefill: past the learned positions, max_length") \
  X(STREAM_INPUT, BAD_ARGUMENT, "luna_stream_prefill: the batch is not the stream's, or lengths are not null") \
  X(STREAM_ORDER, BAD_ARGUMENT, "luna_stream_reorder: from is null or has an index outside 0..batch - 1") \
  X(STREAM_COPY, BAD_ARGUMENT, "luna_stream_copy: from is null or of another model size or batch") \
  X(STREAM_STATE_SIZE, BAD_ARGUMENT, "luna_stream_state_load: bytes is null or size is not luna_stream_state_size") \
  X(STREAM_STATE, BAD_ARGUMENT, "luna_stream_state_load: the state is of another model size or batch, or damaged")

#define LUNA_ERRORS(X) \
  LUNA_STREAM_ERRORS(X) \
  X(STREAM_DEVICES, BAD_ARGUMENT, "luna_stream_copy: the streams are on devices of two contexts; use " \
    "luna_stream_state_save and luna_stream_state_load") \
  X(NO_CONTEXT, BAD_ARGUMENT, \
    "there is no context: luna_open failed (out of memory, a block that is too small or given with " \
    "a device, threads below 0, an isa that this build or machine lacks, allocate without release or the reverse, an " \
    "unknown form, or a backend of another version)") \
  /* from a backend, the user's own too: the status and, by luna_backend_fail, the sentence are what it gave */ \
  X(BACKEND, DEVICE_FAILED, "%s: the backend failed: %s") \
  X(NO_OP, UNSUPPORTED, "%s: this backend has no op %s") \
  X(GRAPH_ORDER, BAD_ARGUMENT, \
    "%s: luna_graph_begin and luna_graph_end of one graph take turns, one graph at a time in a " \
    "context") \
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
  X(PROBABILITY, BAD_ARGUMENT, "%s: %s is %f, outside [0, 1)") \
  X(NOT_FINITE_ARGUMENT, BAD_ARGUMENT, "%s: %s is %f; it must be finite") \
  X(NEGATIVE, BAD_ARGUMENT, "%s: %s is %f; it must be finite and not negative") \
  X(SHAPE, BAD_ARGUMENT, "%s: %s %t of rank %d is invalid: at most 4 axes, none negative, and %d elements in all") \
  X(TOO_LARGE, BAD_ARGUMENT, "%s: %d times %d elements are more than %d") \
  X(NOT_UTF8, BAD_ARGUMENT, "%s: %s is not UTF-8") \
  /* tensors */ \
  X(NO_GRAD, BAD_ARGUMENT, "luna_read_grad: tensor %t has no gradient: call luna_backward first, and " \
    "luna_require_grad for the result of an op") \
  X(WRITE_BORROWED, BAD_ARGUMENT, "luna_write: tensor %t reads values of another set or a file in place") \
  X(NOT_ONE_ELEMENT, BAD_ARGUMENT, "%s: tensor %t has %d elements; reduce it to one") \
  X(NO_TAPE, BAD_ARGUMENT, "luna_backward: nothing to differentiate (no parameter took part, not in luna_begin_step, " \
    "or called twice)") \
  X(TOO_MANY_TENSORS, BAD_ARGUMENT, "%s: %d tensors are given, at most %d are possible") \
  /* ops */ \
  X(RANK, BAD_ARGUMENT, "%s: tensor %t has fewer than %d axes") \
  X(AXIS, BAD_ARGUMENT, "%s: tensor %t has no axis %d") \
  X(RESHAPE, BAD_ARGUMENT, "luna_reshape: %t has %d elements, which do not make %t") \
  X(SLICE_RANGE, BAD_ARGUMENT, "luna_slice: start %d + count %d exceeds axis %d of %t") \
  X(PERMUTE_AXES, BAD_ARGUMENT, "luna_permute: axis %d of %t occurs twice or does not exist") \
  X(CONCAT_SHAPES, BAD_ARGUMENT, "%s: %t and %t differ in an axis other than %d") \
  X(EXPAND_RANK, BAD_ARGUMENT, "luna_expand: tensor %t has 4 axes already, which is the maximum") \
  X(BROADCAST, BAD_ARGUMENT, \
    "%s: %t and %t do not broadcast: from the last axis on, sizes must be equal, or one of them 1") \
  X(CLAMP, BAD_ARGUMENT, "luna_clamp: low %f and high %f: low must not be larger, and neither NaN") \
  X(MATMUL_AXES, BAD_ARGUMENT, "luna_matmul: %t and %t: the second's leading axes must be the last leading axes of " \
    "the first") \
  X(MATMUL_INNER, BAD_ARGUMENT, "luna_matmul: %t and %t: the first has %d columns, the second %d rows") \
  X(WEIGHT_SHAPE, BAD_ARGUMENT, "%s: %s %t must be [out, %d]") \
  X(VECTOR_SHAPE, BAD_ARGUMENT, "%s: %s %t must be [%d]") \
  X(RESIDUAL_SHAPE, BAD_ARGUMENT, "%s: the residual %t must be %t") \
  X(RATIO_EMPTY, BAD_ARGUMENT, "luna_ratio: the last axis of %t has no element to divide by") \
  X(EMBEDDING_TABLE, BAD_ARGUMENT, "luna_embedding: table %t must be [vocab, dim]") \
  X(LABEL_RANGE, BAD_ARGUMENT, "%s: labels[%d] is %d; there are %d classes (a negative label is ignored)") \
  X(SMOOTHING, BAD_ARGUMENT, "%s: smoothing is %f, outside 0..1") \
  X(TARGET_RANGE, BAD_ARGUMENT, "%s: targets[%d] is %f, outside 0..1 (NaN is ignored)") \
  X(TOO_MANY_LOGITS, BAD_ARGUMENT, "%s: input %t and weight %t: too many logits") \
  X(ATTENTION_SHAPES, BAD_ARGUMENT, "%s: q %t, k %t, v %t with %d heads must be [batch, n, h d], [batch, m, h d], " \
    "[batch, m, h e] (with offsets all [rows, ...])") \
  X(PATTERNS, BAD_ARGUMENT, \
    "%s: %d patterns: there must be 1, heads, or batch * heads of them (batch %d, heads %d), with " \
    "ascending queries and offsets, queries of %d rows and runs of %d keys, and no sums or sequences beside them") \
  X(RAGGED_LENGTHS, BAD_ARGUMENT, \
    "luna_softmax_attention: lengths must be null when sequences is %d: query_offsets and " \
    "key_offsets say where sequences end") \
  X(OFFSETS, BAD_ARGUMENT, "%s: %s[%d] is %d; offsets start at 0, never fall, and end at the %d rows") \
  X(CAUSAL_PRODUCT_SHAPES, BAD_ARGUMENT, "luna_causal_product: x %t, y %t, z %t with %d heads must be " \
    "[batch, n, h a] twice and [batch, n, h b]") \
  X(CONVOLUTION_SHAPES, BAD_ARGUMENT, "luna_short_convolution: input %t and weight %t must be [batch, n, d] and " \
    "[d, width]") \
  X(PACK_SHAPES, BAD_ARGUMENT, "luna_pack: weights %t and context %t must be [batch, r, d] and [batch, m, d]") \
  X(UNPACK_SHAPES, BAD_ARGUMENT, "luna_unpack: x %t, k %t, bias %t, v %t must be [batch, n, d], [batch, h, l, d], " \
    "[batch, h, l], [batch, h, l, d], with at least one slot") \
  X(CAUSAL_NESTED_SHAPES, BAD_ARGUMENT, "luna_causal_nested_attention: q %t, k %t, v %t, s %t with %d heads must be " \
    "[batch, n, h d] three times and [batch, n, h l]") \
  X(OMEGA, BAD_ARGUMENT, "%s: omega is %d; it must be LUNA_ACTIVATION_SOFTPLUS2, LUNA_ACTIVATION_SOFTPLUS or " \
    "LUNA_ACTIVATION_ELU1, which are never negative") \
  /* parameters */ \
  X(NAME_LENGTH, BAD_ARGUMENT, "%s: a name has %d bytes, more than %d: '%s%s'") \
  X(NAME_RESERVED, BAD_ARGUMENT, "%s: '%s': __metadata__ and names that start with luna. belong to luna.h") \
  X(PARAM_EXISTS, BAD_ARGUMENT, "luna_param: the set has a parameter '%s' already; use another set or prefix") \
  X(SET_BORROWED, BAD_ARGUMENT, "%s: the set borrows its parameters, which are read-only; load a copy into another") \
  X(BORROW_DEVICE, MISMATCH, "%s: %s %t belongs to a context on another device") \
  X(BORROW_ON_DEVICE, MISMATCH, "%s: %s %t: a device reads no host memory in place; load a copy (luna_load_bytes)") \
  X(BORROW_MISSING, MISMATCH, "%s: there is no %s %t to borrow from") \
  X(BORROW_SHAPE, MISMATCH, "%s: %s %t has another shape where it is borrowed from") \
  X(BORROW_FORMAT, MISMATCH, "%s: %s %t is read in place only as F32, aligned to 4 bytes, on a little-endian machine") \
  /* layers and models */ \
  X(NOT_INITIALIZED, BAD_ARGUMENT, "%s: the layer or model is null or zeroed: its init failed or was not called") \
  X(HEADS, BAD_ARGUMENT, "%s: dim %d is not a multiple of %s %d") \
  X(FIELD_DIFFERS, BAD_ARGUMENT, "%s: %s is %d but %s is %d: set the first to 0 or make both equal") \
  X(FIELD_UNUSED, BAD_ARGUMENT, "%s: %s is %d; it must be 0 %s") \
  X(LUNA_ONLY, UNSUPPORTED, "%s: %s has Luna attention only, whose memory the layers pass on: attention and " \
    "own_memory must be 0, hook null") \
  X(HOOK_INIT, BAD_ARGUMENT, "%s: the attention hook's init returned null for '%s'") \
  X(HOOK_NULL, BAD_ARGUMENT, "%s: the attention hook's forward returned null") \
  X(HOOK_SHAPE, BAD_ARGUMENT, "%s: the attention hook's forward returned %t; it must be %t, as its x") \
  X(LINFORMER_CAUSAL, UNSUPPORTED, "%s: Linformer mixes all positions and has no causal form") \
  X(LINFORMER_PROJECTION, BAD_ARGUMENT, "luna_attention_layer_forward: this Linformer layer shares layerwise; set " \
    "its e and f first") \
  X(SEQUENCE_SHAPE, BAD_ARGUMENT, "%s: %s %t must be [%d, n, %d]") \
  X(MEMORY_SHAPE, BAD_ARGUMENT, "%s: p %t must be [l, %d] or [%d, l, %d]") \
  X(MAX_LENGTH, BAD_ARGUMENT, "%s: a sequence of %d exceeds max_length %d") \
  X(BATCHES_DIFFER, BAD_ARGUMENT, "%s: the batches %d and %d differ") \
  X(POOLING_MEMORY, BAD_ARGUMENT, "luna_classifier_init: pooling the memory needs Luna attention, which has one") \
  X(POOL_EMPTY, BAD_ARGUMENT, "luna_classifier_pool: %t has no first row") \
  X(CLASSIFIER_PAIR, BAD_ARGUMENT, "luna_classifier_forward: this model compares two sequences; call " \
    "luna_classifier_forward_pair") \
  X(CLASSIFIER_SINGLE, BAD_ARGUMENT, "luna_classifier_forward_pair: this model reads one sequence; call " \
    "luna_classifier_forward") \
  X(NO_LABELS, BAD_ARGUMENT, "luna_masked_lm_loss: none of the %d labels is 0 or more") \
  X(SHARED_VOCAB, BAD_ARGUMENT, "%s: share_embeddings needs vocab %d and target_vocab %d to be equal") \
  X(LOGITS_NOT_FINITE, BAD_ARGUMENT, "luna_seq2seq_generate: the model's logits for source %d are not finite") \
  X(STREAM_CONFIG, BAD_ARGUMENT, "%s: %s") \
  X(STREAM_ATTENTION, UNSUPPORTED, "luna_stream_open: only Luna attention streams in constant memory; with another " \
    "attention or a hook call luna_lm_forward on the whole sequence") \
  /* training */ \
  X(NESTEROV, BAD_ARGUMENT, "%s: nesterov needs a momentum above 0") \
  X(GROUP_EMPTY, MISMATCH, "luna_optimizer_group: no parameter fits name '%s' (empty = any) and " \
    "max_rank %d (0 = any)") \
  X(FREEZE_EMPTY, MISMATCH, "luna_params_freeze: no parameter's name has '%s' in it") \
  X(NO_BACKWARD, BAD_ARGUMENT, "luna_optimizer_step: no luna_backward since the last step. Call it before each step; " \
    "a null loss means that an earlier call failed or that the model was never initialised") \
  X(SKIPPED_STEPS, NOT_FINITE, "luna_optimizer_step: %d steps in a row skipped, up to step %d: the loss or a " \
    "gradient was not finite. The parameters are as before. Lower lr, set clip, or look for NaN and Inf in the data") \
  /* files */ \
  X(CANNOT_OPEN, CANNOT_READ, "%s: '%s' cannot be opened; does it exist, and may it be read?") \
  X(READ_IRREGULAR, CANNOT_READ, "%s: '%s' is not a regular file") \
  X(READ_FAILED, CANNOT_READ, "%s: %s could not be read in full (%d bytes)") \
  X(WRITE_FAILED, CANNOT_WRITE, "%s: %s could not be written in full") \
  X(SAVE_PATH, CANNOT_WRITE, "%s: the path, or what it links to, is longer than %d bytes: '%s'") \
  X(SAVE_LINK, CANNOT_WRITE, "%s: '%s' is a link that leads nowhere") \
  X(SAVE_IRREGULAR, CANNOT_WRITE, "%s: '%s' is not a regular file and is left as it is") \
  X(SAVE_LOOKUP, CANNOT_WRITE, "%s: the folder of '%s' cannot be searched") \
  X(SAVE_TEMPORARY, CANNOT_WRITE, "%s: no temporary file can be made beside '%s'; does the folder " \
    "exist, and may it be written to?") \
  X(SAVE_REPLACE, CANNOT_WRITE, "%s: '%s' cannot be replaced") \
  X(NOT_SAFETENSORS, BAD_FILE, "%s: %s is not a valid safetensors file: %s") \
  X(NOT_A_MODEL, BAD_FILE, "%s: %s does not hold such a model: %s") \
  X(FILE_FIELD, BAD_FILE, "%s: %s is missing from the metadata of %s, or out of range") \
  X(FILE_COUNTERS, BAD_FILE, "%s: the counters in %s contradict each other: %d attempts, %d updates, %d skipped, of " \
    "these %d in a row") \
  X(FILE_TENSOR_MISSING, MISMATCH, "%s: %s has no tensor '%s' of shape %t in F32, F16, BF16 or F64") \
  X(FILE_TENSOR_EXTRA, MISMATCH, "%s: tensor '%s' of %s is not a parameter of this set") \
  X(FILE_TENSOR_SHAPE, MISMATCH, "%s: parameter '%s' is %t and has another shape in %s") \
  X(FILE_TENSOR_COUNT, MISMATCH, "%s: %s has %d tensors, the model %d") \
  X(NOTHING_MATCHES, MISMATCH, "%s: none of the %d parameters is in %s in its shape") \
  X(SET_NOT_EMPTY, BAD_ARGUMENT, "%s: the set has %d parameters already; load into a new one") \
  X(OPTIMIZER_KIND, MISMATCH, "%s: %s is of another kind of optimiser (luna.optimizer %d, not %d)") \
  X(MOMENT_COUNT, MISMATCH, "%s: %s has %d moments, the optimiser %d") \
  X(MOMENT, MISMATCH, "%s: moment %d of '%s' is missing from %s, of another shape, or not F32")

typedef enum luna_error_id {
  LUNA_ERROR_NONE = 0,
#define LUNAI_ERROR(id, status, sentence) LUNA_ERROR_##id,
  LUNA_ERRORS(LUNAI_ERROR)
#undef LUNAI_ERROR
  LUNA_ERROR_COUNT
} luna_error_id;

/* Instruction sets. luna.h picks the best at run time; options and arguments can force one (for tests). SCALAR is there
   where no other is. REFERENCE: plain loops from the equations, slow, on the caller's thread, the same bits on every
   machine; a context that was opened with it runs whole models. */
typedef enum luna_isa {
  LUNA_ISA_BEST = 0, LUNA_ISA_SCALAR, LUNA_ISA_SSE2, LUNA_ISA_AVX2, LUNA_ISA_AVX512, LUNA_ISA_NEON, LUNA_ISA_WASM,
  LUNA_ISA_REFERENCE
} luna_isa;
LUNA_API luna_isa luna_isa_best(void);
LUNA_API bool luna_isa_available(luna_isa isa);
LUNA_API const char *luna_isa_name(luna_isa isa);

/* Maps of single numbers: M(NAME, name, value, slope) is LUNA_ACTIVATION_NAME and luna_name, with its value at x and
   its derivative there, which may use y, the value; both in the kernels' vector functions (>>vector). NaN stays NaN.
   The first are a layer's activations; the others are for luna_activate alone. ELU1 is elu(x) + 1 [arXiv 2006.16236],
   GELU the exact (erf) form, SOFTPLUS ln(1 + e^x), SOFTPLUS2 log2(1 + 2^x), SILU x sigmoid(x), RSQRT 1 / sqrt(x). */
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
  M(TANH, tanh, vf_tanh(x), vf_fnma(y, y, vf_of(1)))
#define LUNA_MAPS(M) \
  LUNA_ACTIVATIONS(M) \
  M(EXP, exp, vf_exp(x), y) \
  M(LOG, log, vf_select(vf_lt(x, vf_zero()), vf_sqrt(x), vf_log(x)), vf_div(vf_of(1), x)) \
  M(SQRT, sqrt, vf_sqrt(x), vf_div(vf_of(0.5), y)) \
  M(RSQRT, rsqrt, vf_div(vf_of(1), vf_sqrt(x)), vf_div(vf_mul(vf_of(-0.5), y), x)) \
  M(ABS, abs, vf_abs(x), vf_select(vf_gt(x, vf_zero()), vf_of(1), vf_select(vf_lt(x, vf_zero()), vf_of(-1), x)))
typedef enum luna_activation {
  LUNA_ACTIVATION_NONE = 0,
#define LUNAI_MAP(NAME, name, value, slope) LUNA_ACTIVATION_##NAME,
  LUNA_MAPS(LUNAI_MAP)
#undef LUNAI_MAP
  LUNA_ACTIVATION_COUNT
} luna_activation;

/* Of a model's embedding. Default: sinusoidal; none in luna_lm. */
typedef enum luna_positions {
  LUNA_POSITIONS_DEFAULT = 0, LUNA_POSITIONS_NONE, LUNA_POSITIONS_SINUSOIDAL, LUNA_POSITIONS_LEARNED
} luna_positions;

/* Sequences of tokens or, where a model's config has features, of features: what every model reads. The arrays are
   copied into the step. */
typedef struct luna_input {
  /* [batch,n], each in 0..vocab - 1, in the padding too, where the value changes nothing */
  const int32_t *tokens;
  const int32_t *lengths;            /* [batch] real steps of each sequence, 0..n; null = n of each */
  int64_t batch, n;
  /* [batch,n,features]; NaN is a missing number, Inf is not: through a causal model it spoils all later steps; the
     padding may hold anything */
  const float *features;
} luna_input;

/* Runs task(work, i) for each i in [0, count), in any order, on any threads, and returns when all are done. */
typedef void (*luna_parallel_for)(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work);

#endif /* what every build has */

#if (!defined(LUNA_ONLY_STREAM) || defined(LUNA_IMPLEMENTATION)) && !defined(LUNAI_REST_H)
#ifdef LUNA_ONLY_STREAM
#pragma push_macro("LUNA_API")
#undef LUNA_API
#define LUNA_API LUNAI_PRIVATE
#endif
/* Sparse attention: the keys that each query of a head sees [arXiv 1904.10509, 2004.05150, 2007.14062]. `window` alone
   is sliding-window attention: query i sees the keys j with -left <= j - i <= right. Lists are for what a window is
   not: queries in blocks, each with runs of keys, which all queries of the block see, but for what the window leaves
   out. A query of no block gets zeros, as one that sees no key does; its log-sum-exp is -Inf. Time and memory go by the
   keys of the blocks' runs that are in the windows of some of their queries. With patterns, lengths (null: all) are of
   queries too: queries and keys beyond are not read. */
typedef struct luna_key_run {
  int32_t first, count;              /* keys first .. first + count - 1, or those of key_order */
  bool whole;                        /* every query of the block sees all of them, whatever the window */
} luna_key_run;
typedef struct luna_attention_pattern {
  bool window;
  int64_t left, right;               /* may be negative: right -1 is j < i */
  bool not_self;                     /* query i does not see key i */
  int64_t blocks;                    /* 0: no lists, a query sees all keys of its window */
  const int32_t *queries;            /* [blocks + 1] ascending: block c has queries queries[c] .. queries[c + 1] - 1 */
  const int32_t *offsets;            /* [blocks + 1] ascending: and sees runs[offsets[c]] .. runs[offsets[c + 1] - 1] */
  const luna_key_run *runs;          /* a key in two runs of a block counts twice */
  const int32_t *query_order;        /* [queries[blocks]] rows, each once: the order of the queries' numbers; or null */
  const int32_t *key_order;          /* [key_count] rows in whose order runs number keys, or null; windows go by rows */
  int64_t key_count;
} luna_attention_pattern;

/* ---------------------------------------------------------------------------------------------------------------------
   >>functions: the kernels by themselves, for use in another engine; no context, no allocation
   Strides are in floats, 0 = dense, never negative; rows that are read may overlap, what is written must not. An array
   reaches over at most 2^47 floats: beyond that, and for arguments that are null or not finite, LUNA_BAD_ARGUMENT.
   Threads: the caller's alone, or `threads` tasks (at most 256) through parallel_for; the bits do not depend on it.
   Scratch: luna_..._scratch(&args) bytes; without it (null) a call uses at most 8 KB of stack and is slower or, where
   that cannot be enough, returns LUNA_OUT_OF_MEMORY. Nothing is written on failure.
   ------------------------------------------------------------------------------------------------------------------ */
typedef struct luna_run {
  luna_isa isa;                      /* 0: best */
  void *scratch;                     /* any alignment */
  size_t scratch_size;
  luna_parallel_for parallel_for;    /* null: the caller's thread */
  void *parallel_user;
  int threads;                       /* tasks for parallel_for; 0 = 1 */
} luna_run;
#ifndef LUNA_ONLY_STREAM

/* C = act(alpha A B + bias) (+ C): A [m, k], B [k, n], C [m, n], `batch` times */
typedef struct luna_gemm_args {
  const float *a, *b, *bias;         /* bias [n] or null */
  float *c;
  int64_t m, n, k, batch;            /* batch 0 = 1 */
  bool transpose_a, transpose_b;     /* A stored [k, m]; B stored [n, k] */
  int64_t a_row, b_row, c_row;       /* floats from one stored row to the next */
  int64_t a_batch, b_batch, c_batch; /* from one product to the next; A and B: LUNA_SHARED, the same for all */
  float alpha;                       /* 0 = 1 */
  luna_activation activation;
  bool accumulate;                   /* add to C */
  luna_run run;
} luna_gemm_args;
LUNA_API luna_status luna_gemm_f32(const luna_gemm_args *args);
LUNA_API size_t luna_gemm_scratch(const luna_gemm_args *args);

/* a batch stride of what is read: one for all; its gradient is the sum, in order */
#define LUNA_SHARED (-1)

/* softmax(scale Q K^T) V per head, online: no score is stored (eq. 1; arXiv 2205.14135). q and out [batch, queries,
   heads, dim], k and v [batch, keys, heads, dim]; ragged batches (no padding) instead by row offsets. */
typedef struct luna_attention_args {
  const float *q, *k, *v;
  float *out;
  float *log_sum_exp;                /* [rows, heads] or null; written by forward, needed by backward */
  float *sums;                       /* [rows, heads] or null: row sums of the attention matrix after dropout; null with
                                        patterns */
  int64_t batch, heads, queries, keys, head_dim;
  int64_t value_dim;                 /* 0 = head_dim */
  int64_t q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head;
  const int32_t *lengths;            /* [batch] real keys; the rest are never read; 0 gives zeros. null: all */
  const int32_t *query_offsets, *key_offsets; /* [batch + 1] first rows of a ragged batch's sequences, or null */
  float scale;                       /* 0 = 1/sqrt(head_dim) */
  bool causal;                       /* query i sees keys j <= i, also where queries and keys differ in number */
  /* probability; element ((b heads + head) queries + i) keys + j of op `dropout_op`; of a pattern with key_order,
     key_count and the number in it for keys and j */
  float dropout;
  uint64_t seed;
  uint32_t dropout_op, step;
  const float *grad_out, *grad_sums; /* backward: as out and sums (grad_sums may be null); it reads forward's out too */
  float *grad_q, *grad_k, *grad_v;   /* backward adds to these, laid out as q, k, v; any may be null */
  const luna_attention_pattern *patterns; /* [pattern_count], or null: every query sees all keys */
  int64_t pattern_count;             /* 1: for all; `heads`: one a head; batch * heads: one a batch row and head */
  const float *grad_log_sum_exp;     /* backward, with patterns: as log_sum_exp, or null */
  luna_run run;
} luna_attention_args;
LUNA_API luna_status luna_softmax_attention_f32(const luna_attention_args *args);
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_softmax_attention_backward_f32(const luna_attention_args *args);
#endif
LUNA_API size_t luna_softmax_attention_scratch(const luna_attention_args *args); /* enough for both */

/* The causal product, eq. 7: out_t = (1/t) x_t sum_{j<=t} y_j^T z_j. x, y [batch, rows, heads, dim], z, out [batch,
   rows, heads, value_dim] */
typedef struct luna_causal_args {
  const float *x, *y, *z;
  float *out;
  int64_t batch, rows, heads, dim, value_dim;
  const float *grad_out;             /* backward */
  float *grad_x, *grad_y, *grad_z;   /* backward adds; any may be null */
  luna_run run;
} luna_causal_args;
LUNA_API luna_status luna_causal_product_f32(const luna_causal_args *args);
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_causal_product_backward_f32(const luna_causal_args *args);
#endif
LUNA_API size_t luna_causal_product_scratch(const luna_causal_args *args);

/* Philox4x32-10 (Salmon et al. 2011), the source of every random number here */
LUNA_API void luna_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]);

#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>context: memory, threads, errors, the step protocol
   ------------------------------------------------------------------------------------------------------------------ */
typedef struct luna_ctx luna_ctx;
typedef struct luna_backend luna_backend;

typedef struct luna_allocator {      /* set both functions or neither; allocate may return null and need not align */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *pointer, size_t bytes);
  void *user;
} luna_allocator;

/* How Luna attention is computed. Folded: the projections of the long sequence are multiplied into the short memory's
   side, the same function up to rounding in less time and memory; unfolded: as written in the paper. */
typedef enum luna_form { LUNA_FORM_CHEAPEST = 0, LUNA_FORM_UNFOLDED, LUNA_FORM_FOLDED } luna_form;

typedef struct luna_options {
  int threads;                       /* 0 = one a core */
  luna_parallel_for parallel_for;    /* the caller's threads instead of a pool; give `threads` too */
  void *parallel_user;
  luna_isa isa;                      /* 0 = best */
  uint64_t seed;                     /* of initial parameters and dropout */
  luna_allocator allocator;          /* zero = LUNA_MALLOC, LUNA_FREE */
  void *block;                       /* all memory, once and for all: then no allocator is ever called */
  size_t block_size;
  bool measure;                      /* compute nothing; luna_memory().peak is the block_size the same calls need */
  void (*log)(void *user, luna_status status, const char *sentence); /* each failure as it happens */
  void *log_user;
  luna_form form;                    /* 0 = by cost */
  const luna_backend *backend;       /* 0 = this CPU */
} luna_options;

/* Null options: all defaults. Returns null when out of memory, the block is too small or an option is invalid;
   luna_error(NULL) lists what can be. A backend whose device cannot be opened gives a context in which every call fails
   with the reason in luna_error. */
LUNA_API luna_ctx *luna_open(const luna_options *options);
/* Frees everything made from it but streams (luna_stream_close); null is fine. Contexts close in any order: what reads
   a closed one's parameters (sets that share them, streams on the CPU) can afterwards only be closed. */
LUNA_API void luna_close(luna_ctx *ctx);

#ifndef LUNA_NO_TRAIN
/* Training: tape and dropout on; activations freed; gradients kept. After a step that failed before its luna_backward
   was done this begins the same step again, with the same dropout. */
LUNA_API luna_status luna_begin_step(luna_ctx *ctx);
#endif
LUNA_API luna_status luna_begin_inference(luna_ctx *ctx); /* no tape, no dropout; temporaries freed as layers go */
/* A begin is either of these two. It ends all tensors of the step before it, the loss too: their pointers must not be
   used again, not even by luna_item, so keep the numbers. It fails with the first failed init, load of a model,
   luna_params_open, luna_params_share, luna_param or optimiser, until the same call succeeds, with the same prefix or
   name, in that set or one opened since. To try a file or a config whose failure is to have no effect, use a context of
   its own and close it. */
LUNA_API luna_status luna_ctx_status(const luna_ctx *ctx);     /* of the first failure since the last begin */
/* The sentence of that failure, or of the newest failed call since that is not an op; "" without one */
#ifndef LUNA_ONLY_STREAM
LUNA_API const char *luna_error(const luna_ctx *ctx);
#endif
LUNA_API luna_error_id luna_ctx_error_id(const luna_ctx *ctx); /* the id of that sentence; LUNA_ERROR_NONE */

typedef struct luna_memory_usage { size_t current, peak; } luna_memory_usage; /* bytes */
LUNA_API luna_memory_usage luna_memory(const luna_ctx *ctx);

/* A step on a device in one launch. Work between begin and end runs at the end; where it is the same as in the step
   before, but for the values of tokens, lengths, labels, luna_tensor_new and the learning rate, it is recorded there,
   and from then on launched as a whole. Anything else runs as it would without a graph, and so do the first steps,
   until their memory lies still: with luna_graph_reason's sentence, and never with other bits.

       luna_graph *graph = luna_graph_open(ctx);           null on the CPU: then begin and end do nothing
       for (...) {
         luna_graph_begin(graph);
         luna_begin_step(ctx);
         loss = luna_lm_loss(&model, &input, labels);
         luna_backward(loss);
         luna_optimizer_step(adam);
         if (luna_graph_end(graph) != LUNA_OK) break;      failures of the device arrive here
         ... luna_item(loss) ...                           reading inside has the work before it run at once
       }
   Recorded is what has a fixed place and size: a batch of another size, a label more that is ignored, or a custom op
   that is not recordable make a step run by itself. One graph at a time in a context; freed with it. A stream's single
   tokens are such steps without a call; its steps have no place between begin and end. */
typedef struct luna_graph luna_graph;
LUNA_API luna_graph *luna_graph_open(luna_ctx *ctx);
LUNA_API void luna_graph_close(luna_graph *graph);                  /* null is fine */
LUNA_API luna_status luna_graph_begin(luna_graph *graph);           /* null: LUNA_OK */
LUNA_API luna_status luna_graph_end(luna_graph *graph);
/* why the last one was not one launch; "": it was */
LUNA_API const char *luna_graph_reason(const luna_graph *graph);

/* ---------------------------------------------------------------------------------------------------------------------
   >>tensors: row-major, contiguous, up to four axes; read-only to users
   What ops and luna_tensor_new make lives until the next begin or the end of the scope around it. Every op returns null
   on failure and for a null input; the context says why.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNA_MAX_RANK 4
typedef enum luna_dtype { LUNA_DTYPE_F32 = 0, LUNA_DTYPE_F16, LUNA_DTYPE_BF16 } luna_dtype; /* F32 is implemented */

typedef struct luna_tensor {
  float *data;                       /* null in a context that measures, and once released by a scope's end */
  /* null until backward has reached it; an op's result loses it again unless luna_require_grad was called */
  float *grad;
  int64_t shape[LUNA_MAX_RANK];      /* axes at and beyond rank are 1 */
  int rank;
  luna_dtype dtype;
  int device;                        /* the backend's number; 0 = CPU */
  bool needs_grad;
  bool parameter;                    /* its grad lives until close, not with the step */
  bool borrowed;                     /* a parameter whose values are another's */
  bool has_grad;                     /* backward has reached it (grad stays null in a context that measures) */
  luna_ctx *ctx;
  struct luna_tensor *base;          /* a view's owner, else null */
  int64_t offset;                    /* a view's first element within base */
  struct luna_op *maker;             /* the rest is luna.h's own: the op of the tape whose result this is, */
  struct luna_op *last_reader;       /* the newest op of the tape that reads it, */
  struct luna_tensor *older;         /* the tensor made before this one in the step, */
  struct lunai_piece *data_piece, *grad_piece; /* memory of the step that can be released before the step ends; */
  struct lunai_piece *given_piece;   /* data_piece, while luna_backward only counts memory and this is free; */
  bool keep_data, keep_grad;         /* luna_keep and luna_require_grad: stays until the next begin */
  bool saved, released, recomputed;  /* a backward reads data; data was released; and computed again */
  bool internal;                     /* its scope has ended: data are released once backward no longer reads them */
  /* the next of the parameters whose first gradient luna_backward has just allocated */
  struct luna_tensor *reserved;
} luna_tensor;

LUNA_API int64_t luna_count(const luna_tensor *t);                  /* elements; 0 for null */
/* A copy of values, zeros when null. As an op's result it ends with the next begin: make it anew in each step. */
LUNA_API luna_tensor *luna_tensor_new(luna_ctx *ctx, const float *values, int rank, const int64_t *shape);

/* Scopes: memory that lasts as long as it is needed. Every forward of a layer or model is one; a function of your own
   that makes more tensors than it returns may be one too:

       luna_scope s = luna_scope_begin(ctx);
       luna_tensor *y = luna_linear(luna_gelu(luna_linear(x, w1, b1)), w2, b2);
       return luna_scope_end(s, &y, 1);

   The end releases the data of all tensors made since the beginning, but for the results and what they are views of,
   what luna_keep was called for, and, in training, what backward will read and cannot compute again by cheap ops.
   Scopes nest. Ended again, as in a loop over layers, a scope releases the results of its earlier ends.
   luna_scope_end returns results[0]; any entry may be null. Null for results, or a count below 1: null is returned and
   nothing is released. */
typedef struct luna_scope {
  luna_ctx *ctx; luna_tensor *made; struct luna_op *tape; bool recompute; size_t used[2];
} luna_scope;
LUNA_API luna_scope luna_scope_begin(luna_ctx *ctx);
/* Gradient checkpointing (arXiv 1604.06174): a scope of which training keeps nothing but the results; backward runs its
   ops again, with the same dropout. Less memory, the same gradients bit for bit. Scopes inside may be of any kind. */
LUNA_API luna_scope luna_scope_recompute(luna_ctx *ctx);
LUNA_API luna_tensor *luna_scope_end(luna_scope scope, luna_tensor *const *results, int count);
/* t, whose data stay until the next begin: call it before the scope ends */
LUNA_API luna_tensor *luna_keep(luna_tensor *t);

/* marks a tensor as one whose gradient is wanted, and stays until the next begin */
LUNA_API luna_tensor *luna_require_grad(luna_tensor *t);
/* the value of a one-element tensor, before the next begin; NaN on failure */
LUNA_API float luna_item(const luna_tensor *t);
/* copies luna_count(t) values; fails when they were released: luna_keep */
LUNA_API luna_status luna_read(const luna_tensor *t, float *out);
LUNA_API luna_status luna_read_grad(const luna_tensor *t, float *out);
#ifndef LUNA_ONLY_STREAM
/* Of each row of x [...,n], for the host: its k largest in falling order, of equals the first first, NaN before all:
   indices [...,k], and values [...,k] or null. luna_argmax: indices [...] of the largest. */
LUNA_API luna_status luna_top_k(const luna_tensor *x, int64_t k, int32_t *indices, float *values);
LUNA_API luna_status luna_argmax(const luna_tensor *x, int32_t *indices);
/* The values as text, in NumPy's way: of more than 1000 the first and last 3 of each axis longer than 6 */
LUNA_API luna_status luna_print(const luna_tensor *t, void (*write)(void *user, const char *text), void *user);
#endif
/* sets luna_count(t) values; not of a tensor that is borrowed */
LUNA_API luna_status luna_write(luna_tensor *t, const float *values);

#ifndef LUNA_NO_TRAIN
/* Runs the tape backwards from a one-element tensor, adds to every .grad, and empties the tape: one backward a begin.
   All the memory it needs is taken before anything is added: without it no gradient has changed, and the step may be
   made again. */
LUNA_API luna_status luna_backward(luna_tensor *loss);
#endif

/* >>ops. Shapes: "..." is any leading axes. Source in brackets. */
LUNA_API luna_tensor *luna_reshape(luna_tensor *x, int rank, const int64_t *shape);       /* view; one axis may be -1 */
/* axis 0: view; others: copy */
LUNA_API luna_tensor *luna_slice(luna_tensor *x, int axis, int64_t start, int64_t count);
/* out axis i is x's axes[i]; copy */
LUNA_API luna_tensor *luna_permute(luna_tensor *x, const int *axes);
LUNA_API luna_tensor *luna_transpose(luna_tensor *x, int axis, int other);                /* swaps two axes; copy */
LUNA_API luna_tensor *luna_concat(luna_tensor *const *x, int count, int axis);            /* up to 8 */
/* [...] -> [count, ...], copies along a new axis 0 */
LUNA_API luna_tensor *luna_expand(luna_tensor *x, int64_t count);
#define LUNA_READS_IN(i) (1 << (i))
#define LUNA_READS_OUT(i) (256 << (i))
/* Ops that compute each number of the result from one of each input, which broadcast: E(name, tier, reads, cheap,
   function, differentiable inputs, value, and its gradient for each of them) in a, b and c, of the inputs, and g, of
   the result, by the kernels' vector functions (>>vector). */
#define LUNA_BINARIES(E) \
  E(ADD, 1, 0, true, add, 3, vf_add(a, b), g, g, g) \
  E(SUB, 1, 0, true, sub, 3, vf_sub(a, b), g, vf_neg(g), g) \
  E(MUL, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false, mul, 3, vf_mul(a, b), vf_mul(g, b), vf_mul(g, a), g) \
  E(DIV, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false, div, 3, vf_div(a, b), vf_div(g, b), \
    vf_neg(vf_mul(vf_div(g, b), vf_div(a, b))), g) \
  E(MINIMUM, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false, minimum, 3, \
    vf_select(vf_le(a, b), a, vf_select(vf_lt(b, a), b, vf_add(a, b))), vf_select(vf_lt(b, a), vf_zero(), g), \
    vf_select(vf_lt(b, a), g, vf_zero()), g) \
  E(MAXIMUM, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false, maximum, 3, \
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
/* luna_add(a, b), luna_sub, luna_mul, luna_div, luna_minimum, luna_maximum, luna_less, luna_less_equal, luna_equal,
   luna_not_equal: one for each row of LUNA_BINARIES. They broadcast as in NumPy: aligned at the last axis, sizes are
   equal or one of them is 1 or missing, and repeats; so do all inputs of luna_where. A comparison's result is 1 or 0,
   without gradient. Of equal numbers minimum and maximum give the gradient to a; NaN in either is the result. */
#define LUNAI_BINARY(NAME, tier, reads, cheap, name, inputs, value, da, db, dc) \
  LUNA_API luna_tensor *luna_##name(luna_tensor *a, luna_tensor *b);
LUNA_BINARIES(LUNAI_BINARY)
#undef LUNAI_BINARY
LUNA_API luna_tensor *luna_greater(luna_tensor *a, luna_tensor *b);
LUNA_API luna_tensor *luna_greater_equal(luna_tensor *a, luna_tensor *b);
/* a where condition is not 0 (NaN is not), b elsewhere */
LUNA_API luna_tensor *luna_where(luna_tensor *condition, luna_tensor *a, luna_tensor *b);
/* low and high may be infinite; NaN stays; gradient from low to high, both included */
LUNA_API luna_tensor *luna_clamp(luna_tensor *x, float low, float high);
LUNA_API luna_tensor *luna_add_scalar(luna_tensor *x, float number);
LUNA_API luna_tensor *luna_scale(luna_tensor *x, float factor);
LUNA_API luna_tensor *luna_sum(luna_tensor *x, int axis);           /* removes the axis; [n] -> [1] */
LUNA_API luna_tensor *luna_mean(luna_tensor *x, int axis);          /* likewise */
LUNA_API luna_tensor *luna_sum_all(luna_tensor *x);                 /* of all elements -> [1] */
LUNA_API luna_tensor *luna_mean_all(luna_tensor *x);                /* likewise */
LUNA_API luna_tensor *luna_cumsum(luna_tensor *x, int axis);        /* y_i = x_0 + ... + x_i along the axis */
/* the gradient goes to the first of equals; NaN wins */
LUNA_API luna_tensor *luna_max(luna_tensor *x, int axis);
/* [...,m,k] x [...,k,n]; b's leading axes = a's last leading axes */
LUNA_API luna_tensor *luna_matmul(luna_tensor *a, luna_tensor *b, bool transpose_a, bool transpose_b);
/* [...,in] W^T + b; weight [out,in], bias [out] or null */
LUNA_API luna_tensor *luna_linear(luna_tensor *x, luna_tensor *weight, luna_tensor *bias);
/* act(x W1^T + b1) W2^T + b2 by blocks of rows, what a Transformer's half-layer does: w1 [hidden,in], w2 [out,hidden],
   b1 and b2 or null */
typedef struct luna_feed_forward_config {
  luna_activation activation;        /* 0 = LUNA_ACTIVATION_RELU */
  float activation_dropout, dropout; /* of the hidden layer; of the result */
  luna_tensor *residual;             /* [...,out], added to the result, or null */
  /* the hidden layer is computed again in backward, to the same bits, instead of kept */
  bool recompute;
  luna_tensor *gate, *gate_bias;     /* [hidden,in], and [hidden] or null: the hidden layer is act(x W1^T + b1) times
                                        x G^T + g [arXiv 2002.05202]: GLU with LUNA_ACTIVATION_SIGMOID, SwiGLU with
                                        LUNA_ACTIVATION_SILU; null: not gated */
} luna_feed_forward_config;
LUNA_API luna_tensor *luna_feed_forward(luna_tensor *x, luna_tensor *w1, luna_tensor *b1, luna_tensor *w2,
                                        luna_tensor *b2, const luna_feed_forward_config *config);
/* luna_relu(x), luna_gelu, luna_elu1, luna_softplus, luna_softplus2, luna_sigmoid, luna_silu, luna_tanh, luna_exp,
   luna_log, luna_sqrt, luna_rsqrt, luna_abs: one for each row of LUNA_MAPS */
#define LUNAI_MAP(NAME, name, value, slope) LUNA_API luna_tensor *luna_##name(luna_tensor *x);
LUNA_MAPS(LUNAI_MAP)
#undef LUNAI_MAP
LUNA_API luna_tensor *luna_activate(luna_tensor *x, luna_activation activation); /* any of LUNA_MAPS */
/* over the last axis; lengths [axis 0] of real entries or null */
LUNA_API luna_tensor *luna_softmax(luna_tensor *x, const int32_t *lengths);
LUNA_API luna_tensor *luna_mask(luna_tensor *x, const int32_t *lengths);    /* [batch,n,...]: zeros in rows from
                                                                               lengths[b] on, NaN included; x itself
                                                                               for null */
/* [...,d+1] -> [...,d]: divided by the last element; 0 where that is 0 */
LUNA_API luna_tensor *luna_ratio(luna_tensor *x);
LUNA_API luna_tensor *luna_detach(luna_tensor *x);                  /* the same values, through which no gradient
                                                                       flows */
/* x itself outside training. Element e of the step's op number i (counted over ops that drop) is dropped when half-word
   e mod 8 of Philox counter (e / 8, i, step) under key seed is below round(65536 p). The step counts begins, so that
   two have other masks: check gradients by differences without dropout. */
LUNA_API luna_tensor *luna_dropout(luna_tensor *x, float probability);
/* x / sqrt(mean of x^2 + 1e-5) over the last axis, times weight [last] or null */
LUNA_API luna_tensor *luna_rms_norm(luna_tensor *x, luna_tensor *weight);
/* over the last axis, eps 1e-5; weight, bias [last] or null */
LUNA_API luna_tensor *luna_layer_norm(luna_tensor *x, luna_tensor *weight, luna_tensor *bias);
/* table [V,d] -> [batch,n,d] */
LUNA_API luna_tensor *luna_embedding(luna_tensor *table, const int32_t *tokens, int64_t batch, int64_t n);
/* x [n,...] -> [count,...], row i is x[indices[i]]; each in 0..n - 1, and each as often as wanted */
LUNA_API luna_tensor *luna_gather_rows(luna_tensor *x, const int32_t *indices, int64_t count);
/* x [n,...] with rows[i] of [count,...] added to x[indices[i]], in the order of i -> [n,...] */
LUNA_API luna_tensor *luna_scatter_add_rows(luna_tensor *x, const int32_t *indices, luna_tensor *rows);

typedef struct luna_cross_entropy_config {
  float smoothing;                   /* label smoothing, 0..1 */
  bool ignore;                       /* ignore labels equal to ignore_index; negative labels are ignored anyway */
  int32_t ignore_index;
  bool sum;                          /* default: mean over labels that count (0 when none does) */
} luna_cross_entropy_config;
/* [...,V] and one label a row -> [1], the mean over the labels in 0..V - 1; negative labels are ignored */
LUNA_API luna_tensor *luna_cross_entropy(luna_tensor *logits, const int32_t *labels);
LUNA_API luna_tensor *luna_cross_entropy_with(luna_tensor *logits, const int32_t *labels,
                                              const luna_cross_entropy_config *config);
/* The cross-entropy of luna_linear(x, weight, bias), up to rounding: x [...,in], weight [V,in], bias [V] or null, one
   label a row of x -> [1]. Of more than 1024 classes no logits and no gradient of them are stored: less memory, for one
   more product in backward. */
LUNA_API luna_tensor *luna_linear_cross_entropy(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                                const int32_t *labels, const luna_cross_entropy_config *config);

/* Losses of numbers: values of any shape and luna_count(values) targets in the same order -> [1], the mean over the
   targets that are not NaN (0 when all are). Of each: (x - t)^2; (x - t)^2 / 2 up to |x - t| = delta (0 = 1),
   delta (|x - t| - delta / 2) beyond; and -t ln s(x) - (1 - t) ln (1 - s(x)) of logits x, where s is the logistic
   function and t is in 0..1. */
LUNA_API luna_tensor *luna_mse(luna_tensor *values, const float *targets);
LUNA_API luna_tensor *luna_huber(luna_tensor *values, const float *targets, float delta);
LUNA_API luna_tensor *luna_binary_cross_entropy(luna_tensor *logits, const float *targets);

typedef struct luna_attention_config {
  int64_t heads;                     /* 0 = 1 */
  const int32_t *lengths;            /* [batch] real keys, or null; 0 gives zeros */
  const int32_t *query_offsets, *key_offsets; /* ragged: q [rows, d], k, v [rows, d]; offsets [sequences + 1] */
  int64_t sequences;                 /* of a ragged batch; 0 = padded, the batch is an axis */
  bool causal;                       /* query i sees keys j <= i */
  float scale;                       /* 0 = 1/sqrt(head_dim) */
  float dropout;                     /* of the attention matrix */
  luna_tensor **sums;                /* where to put the row sums [batch, queries, heads], or null */
  const luna_attention_pattern *patterns; /* which keys a query sees: luna_attention_pattern; null: all */
  int64_t pattern_count;             /* 1, heads, or batch * heads */
  luna_tensor **log_sum_exp;         /* where to put the scores' [batch, queries, heads], or null; it has a gradient */
} luna_attention_config;
/* q [batch,n,h d_h], k [batch,m,h d_h], v [batch,m,h d_v] -> [batch,n,h d_v]; heads are slices of the last axis [eq.
   1] */
LUNA_API luna_tensor *luna_softmax_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                             const luna_attention_config *config);
/* [batch,n,h d1] x2, [batch,n,h d2] [eq. 7] */
LUNA_API luna_tensor *luna_causal_product(luna_tensor *x, luna_tensor *y, luna_tensor *z, int64_t heads);
/* depthwise over time: x [batch,n,d], weight [d,width] (last column: the present), bias [d] or null [arXiv
   2212.14052] */
LUNA_API luna_tensor *luna_short_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias);

/* Folded Luna attention [eqs. 3-5, projections moved to the short memory]. pack: weights [batch,r,d] and context
   [batch,m,d] -> softmax(weights context^T) context [batch,r,d]. unpack: softmax over each head's slots of (x k^T +
   bias), times v, plus out_bias: x [batch,n,d], k, v [batch,h,l,d], bias [batch,h,l], out_bias [d]. */
LUNA_API luna_tensor *luna_pack(luna_tensor *weights, luna_tensor *context, const int32_t *lengths, float dropout,
                                luna_tensor **sums);
LUNA_API luna_tensor *luna_unpack(luna_tensor *x, luna_tensor *k, luna_tensor *bias, luna_tensor *v,
                                  luna_tensor *out_bias, const int32_t *lengths, float dropout);
/* Causal Luna attention [section 3.3] on projected q, k, v [batch,n,h d_h] and raw pack scores s [batch,n,h l]; q is
   scaled by 1/sqrt(d_h) here */
LUNA_API luna_tensor *luna_causal_nested_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_tensor *s,
    int64_t heads, luna_activation omega, const int32_t *lengths, float dropout);

/* A user-defined op. forward fills out->data; backward adds to in[i]->grad (null where not wanted) from out->grad.
   state is copied. */
typedef struct luna_custom {
  void (*forward)(const luna_tensor *const *in, int count, luna_tensor *out, void *state);
  void (*backward)(luna_tensor *const *in, int count, const luna_tensor *out, void *state);
  const void *state;
  size_t state_size;
  size_t workspace_size;             /* bytes that either function may use while it runs; on the CPU only */
  bool recordable;                   /* on a device: what they do with the same tensors is the same work, of which
                                        luna_graph may keep a recording; they read nothing back and never wait */
} luna_custom;
LUNA_API luna_tensor *luna_custom_op(luna_tensor *const *in, int count, int rank, const int64_t *shape,
                                     const luna_custom *custom);
/* Inside those functions: the context's instruction set and threads, and the workspace, aligned to 64 bytes, as
   scratch. parallel_for is null where there is one thread. */
LUNA_API luna_run luna_custom_run(const luna_tensor *out);


/* ---------------------------------------------------------------------------------------------------------------------
   >>params: named parameters, what optimisers and checkpoints go by
   ------------------------------------------------------------------------------------------------------------------ */
typedef struct luna_params luna_params;
typedef enum luna_init_kind {
  LUNA_INIT_ZEROS = 0, LUNA_INIT_ONES, LUNA_INIT_XAVIER, LUNA_INIT_NORMAL, LUNA_INIT_UNIFORM, LUNA_INIT_IDENTITY
} luna_init_kind;
/* scale, 0 = 1: the gain of Xavier uniform, the normal's standard deviation, the uniform's bound, the value of ones.
   LUNA_INIT_IDENTITY is for short convolutions: uniform, and 1 more in the last column, so that at first they pass on
   the present. */
typedef struct luna_init { luna_init_kind kind; float scale; } luna_init;

LUNA_API luna_params *luna_params_open(luna_ctx *ctx);               /* freed by luna_close(ctx) */
LUNA_API luna_ctx *luna_params_ctx(const luna_params *params);       /* its context; null for null */
/* A set that reads another's values in place (not trained here): what lets several contexts, each in its own thread,
   run one model. `from` must outlive it and not be trained meanwhile. On a device, where work is queued,
   luna_params_share, each begin and luna_stream_open order what this context then does after what `from`'s context has
   queued until then; before `from` is trained again, wait for what reads it (luna_read, luna_item). */
LUNA_API luna_params *luna_params_share(luna_ctx *ctx, const luna_params *from);
/* A new parameter; its first values depend on the context's seed and its name alone. A name twice is an error. */
LUNA_API luna_tensor *luna_param(luna_params *params, const char *name, int rank, const int64_t *shape, luna_init init);
/* null when there is none; luna_read and luna_read_grad give its values and gradient */
LUNA_API luna_tensor *luna_params_find(const luna_params *params, const char *name);
LUNA_API int64_t luna_params_tensor_count(const luna_params *params);        /* number of tensors */
LUNA_API luna_tensor *luna_params_at(const luna_params *params, int64_t index, const char **name);
LUNA_API int64_t luna_params_element_count(const luna_params *params);       /* number of floats */
LUNA_API luna_status luna_params_zero_grad(luna_params *params);
/* Parameters with `name` in their names (null = all) get no gradient any more, nor the time and memory for one, and no
   optimiser changes them; false: again. LUNA_MISMATCH where no name fits. */
LUNA_API luna_status luna_params_freeze(luna_params *params, const char *name, bool frozen);
/* Text pairs, saved in and loaded from the checkpoint's __metadata__; keys, and names of parameters, that start with
   "luna." belong to luna.h. */
LUNA_API luna_status luna_params_set(luna_params *params, const char *key, const char *value);
LUNA_API const char *luna_params_get(const luna_params *params, const char *key); /* null when there is none */

#ifndef LUNA_ONLY_STREAM
/* >>checkpoints: safetensors. All or nothing: a failed load changes no parameter, a failed save leaves the old file
   whole. */
typedef struct luna_io {
  bool (*read)(void *user, void *bytes, size_t size);        /* exactly size bytes */
  bool (*write)(void *user, const void *bytes, size_t size);
  void *user;
  uint64_t size;                     /* bytes that can be read */
} luna_io;
LUNA_API luna_status luna_save_io(const luna_params *params, const luna_io *io);
LUNA_API luna_status luna_load_io(luna_params *params, const luna_io *io);
/* Copies the values. While it runs it needs, as every call that opens a file, 8 bytes of the step's memory for each
   tensor and each text pair. */
LUNA_API luna_status luna_load_bytes(luna_params *params, const void *bytes, size_t size);
/* No copy: parameters read the bytes in place (F32, 4-byte aligned, little-endian host), which must outlive the set; it
   cannot be trained. Called before init, it skips allocating initial values. */
LUNA_API luna_status luna_load_borrowed(luna_params *params, const void *bytes, size_t size);
/* Loads what fits: each parameter whose name and shape the file has (to go on from a masked language model with a
   classifier). Nothing matching is LUNA_MISMATCH. `report`, if not null, is called with a reason for each parameter
   left unchanged and each tensor not used. */
typedef struct luna_load_report {
  void (*report)(void *user, const char *name, const char *why);
  void *user;
  int64_t loaded, missing, unused;   /* parameters loaded, parameters left as they were, tensors of the file left out */
} luna_load_report;
LUNA_API luna_status luna_load_matching_bytes(luna_params *params, const void *bytes, size_t size,
                                              luna_load_report *report);
/* Lists the text pairs, then the tensors of any safetensors file, in the file's order. What is passed is valid during
   the call. */
typedef struct luna_file_tensor {
  const char *name, *dtype;          /* "F32", "I64", ... */
  int rank;
  int64_t shape[8], count;
  const void *data;                  /* within the file, at any alignment, little-endian */
  size_t bytes;
} luna_file_tensor;
typedef struct luna_inspection {
  void (*pair)(void *user, const char *key, const char *value);
  void (*tensor)(void *user, const luna_file_tensor *entry);
  void *user;
} luna_inspection;
LUNA_API luna_status luna_inspect_bytes(luna_ctx *ctx, const void *bytes, size_t size,
                                        const luna_inspection *inspection);
/* the values, [count]; false when they are not F32, F16, BF16 or F64 */
LUNA_API bool luna_file_tensor_read(const luna_file_tensor *entry, float *out);
#ifndef LUNA_NO_STDIO
LUNA_API luna_status luna_inspect(luna_ctx *ctx, const char *path, const luna_inspection *inspection);
/* Into a new file (.luna-<n>.tmp in that folder), which is flushed and then takes the old one's place and mode. Several
   may save at once: the last counts. A symbolic link stays and its target is replaced or created; any other file that
   is not a regular one is an error. */
LUNA_API luna_status luna_save(const luna_params *params, const char *path);
/* Into a set whose parameters have the file's names and shapes. What is in neither, as heads, pooling, activation or
   positions, is not compared: luna_load_model takes it from the file. */
LUNA_API luna_status luna_load(luna_params *params, const char *path);
LUNA_API luna_status luna_load_matching(luna_params *params, const char *path, luna_load_report *report);
#endif

#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>layers: config, init, forward. `prefix` goes before the parameter names ("layers.0."); null = "".
   An init that fails makes no parameter and zeroes its struct. A forward of a zeroed struct returns null: a layer's
   with a sentence in the context of its input, a model's without one, as no context is known. Where a config has a
   number in two places, one is 0 or equals the other; fields of an attention that is not chosen have no effect.
   ------------------------------------------------------------------------------------------------------------------ */
/* "PREFIX.weight" [out,in], by init; "PREFIX.bias" [out], zeros; prefix with or without the dot */
typedef struct luna_linear_layer { luna_tensor *weight, *bias; } luna_linear_layer;
LUNA_API luna_status luna_linear_layer_init(luna_linear_layer *layer, luna_params *params, const char *prefix,
                                            int64_t in, int64_t out, luna_init init);
LUNA_API luna_tensor *luna_linear_layer_forward(const luna_linear_layer *layer, luna_tensor *x);

/* likewise: weight [dim], ones; bias [dim], zeros */
typedef struct luna_norm_layer { luna_tensor *weight, *bias; } luna_norm_layer;
LUNA_API luna_status luna_norm_layer_init(luna_norm_layer *layer, luna_params *params, const char *prefix, int64_t dim);
LUNA_API luna_tensor *luna_norm_layer_forward(const luna_norm_layer *layer, luna_tensor *x);

/* What a model of features has in place of an embedding: ((x - mean) scale) W^T + b, where a missing number (NaN)
   counts as its mean. Mean and scale, 1 / standard deviation, are saved with the model and never trained: set them by
   luna_input_layer_fit, or luna_write. */
typedef struct luna_input_layer {
  luna_tensor *mean, *scale;         /* "input_norm.mean", zeros, and "input_norm.scale", ones, [features] */
  luna_linear_layer projection;      /* "input_proj" [dim,features] */
} luna_input_layer;
LUNA_API luna_status luna_input_layer_init(luna_input_layer *layer, luna_params *params, const char *prefix,
                                           int64_t features, int64_t dim, luna_init init);
/* From training data, all in one input: means and deviations over the real steps, what is not finite left out. A
   feature that never changes gets scale 1. */
LUNA_API luna_status luna_input_layer_fit(luna_input_layer *layer, const luna_input *input);
/* -> [batch,n,dim] */
LUNA_API luna_tensor *luna_input_layer_forward(const luna_input_layer *layer, const luna_input *input);

/* How the projections are shared [section 3.1, and of version 1 of the paper]: keys with values, not at all, no key
   projection, keys with queries */
typedef enum luna_sharing {
  LUNA_SHARING_TIED = 0, LUNA_SHARING_FULL, LUNA_SHARING_NO_KEY, LUNA_SHARING_QK
} luna_sharing;

/* Luna attention, eqs. 3-5 */
typedef struct luna_nested_attention_layer_config {
  int64_t dim;                       /* d; 0 = 128 */
  int64_t heads;                     /* h, of the unpack; 0 = 4 */
  int64_t pack_heads;                /* h_p; 0 = heads */
  luna_sharing sharing;              /* 0 = tied */
  float dropout;                     /* on both attention matrices */
  bool bert_init;                    /* N(0, 0.02) instead of Xavier */
} luna_nested_attention_layer_config;
typedef struct luna_nested_attention_layer {
  luna_nested_attention_layer_config config;
  /* tied: pk = pv = pc_proj, k = v = c_proj; no-key: pk, k empty; shared-qk: pk = pq, k = q */
  luna_linear_layer pq, pk, pv, q, k, v, out;
} luna_nested_attention_layer;
LUNA_API luna_status luna_nested_attention_layer_init(luna_nested_attention_layer *layer, luna_params *params,
                                                      const char *prefix,
                                                      const luna_nested_attention_layer_config *config);
/* x [batch,n,d], p [batch,l,d], context [batch,m,d] (null = x), lengths [batch] of the context (null = all), masking
   memory slots j >= lengths[b] too -> Y_X [batch,n,d]; *packed_context = Y_P [batch,l,d] (packed_context may be
   null) */
LUNA_API luna_tensor *luna_nested_attention_layer_forward(const luna_nested_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, luna_tensor *context, const int32_t *lengths,
                                                          luna_tensor **packed_context);

/* Causal Luna attention, section 3.3 */
typedef struct luna_causal_attention_layer_config {
  int64_t dim, heads;                /* 0 = 128, 4 */
  luna_sharing sharing;              /* tied (0): k = v = c_proj; full: k_proj and v_proj */
  /* 0 = LUNA_ACTIVATION_SOFTPLUS2, the authors'; LUNA_ACTIVATION_SOFTPLUS or LUNA_ACTIVATION_ELU1 */
  luna_activation omega;
  float dropout;                     /* on the unpack matrix */
  bool bert_init;
} luna_causal_attention_layer_config;
typedef struct luna_causal_attention_layer {
  luna_causal_attention_layer_config config;
  luna_linear_layer pq, pc, q, k, v, out;
} luna_causal_attention_layer;
LUNA_API luna_status luna_causal_attention_layer_init(luna_causal_attention_layer *layer, luna_params *params,
                                                      const char *prefix,
                                                      const luna_causal_attention_layer_config *config);
/* x [batch,n,d], p [batch,l,d] or [l,d] shared by the batch, lengths of real memory slots (null = all) ->
   [batch,n,d] */
LUNA_API luna_tensor *luna_causal_attention_layer_forward(const luna_causal_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, const int32_t *lengths);

/* The attentions that Luna is compared with, each with projections q, k, v and out: softmax attention [eq. 1]; linear
   attention, elu(x)+1 features [arXiv 2006.16236]; Linformer, softmax attention over keys and values that a projection
   has shortened to k rows [arXiv 2006.04768]. */
typedef enum luna_attention_kind {
  LUNA_ATTENTION_LUNA = 0, LUNA_ATTENTION_SOFTMAX, LUNA_ATTENTION_LINEAR, LUNA_ATTENTION_LINFORMER
} luna_attention_kind;
/* E and F; E = F; one E for all layers */
typedef enum luna_linformer_sharing {
  LUNA_LINFORMER_SHARING_HEADWISE = 0, LUNA_LINFORMER_SHARING_KEY_VALUE, LUNA_LINFORMER_SHARING_LAYERWISE
} luna_linformer_sharing;
typedef enum luna_linformer_projection {
  LUNA_LINFORMER_PROJECTION_LINEAR = 0, LUNA_LINFORMER_PROJECTION_MEAN, LUNA_LINFORMER_PROJECTION_MAX,
      LUNA_LINFORMER_PROJECTION_CONVOLUTION
} luna_linformer_projection;
typedef struct luna_linformer_config {
  int64_t k;                         /* projected length; 0 = 64, or max_length where that is less */
  int64_t k_last_layer, k_last_head; /* k falls (or rises) evenly to these; 0 = k */
  int64_t max_length;                /* m, the longest sequence; 0 = 512 (in an encoder: its max_length) */
  luna_linformer_sharing sharing;
  /* linear: E [k,m]; mean, max, strided convolution (kernel [w]): over windows of w = ceil(m / k) rows */
  luna_linformer_projection projection;
} luna_linformer_config;
typedef struct luna_attention_layer_config {
  luna_attention_kind kind;          /* not LUNA_ATTENTION_LUNA; softmax attention with a null config */
  int64_t dim, heads;                /* 0 = 128, 4 */
  bool causal;                       /* softmax and linear attention */
  float dropout;                     /* on the attention matrix (softmax attention, Linformer) */
  bool bert_init;
  luna_linformer_config linformer;
} luna_attention_layer_config;
typedef struct luna_attention_layer {
  luna_attention_layer_config config;
  luna_linear_layer q, k, v, out;
  luna_tensor *e, *f;                /* Linformer: "e_proj", "f_proj" [k,m] or [1,w]; e = f unless headwise.
                                        Layerwise: the caller sets both */
} luna_attention_layer;
LUNA_API luna_status luna_attention_layer_init(luna_attention_layer *layer, luna_params *params, const char *prefix,
                                               const luna_attention_layer_config *config);
/* x [batch,n,d], context [batch,m,d] (null = x), lengths [batch] of the context (null = all) -> [batch,n,d] */
LUNA_API luna_tensor *luna_attention_layer_forward(const luna_attention_layer *layer, luna_tensor *x,
                                                   luna_tensor *context, const int32_t *lengths);

/* A user-defined attention. init makes a layer's parameters, whose names start with prefix ("layers.0.self_attn."), and
   returns what forward will get as `layer` (later the layer's hook_state), null on failure; it belongs to the user.
   forward: call->x [batch,n,d] -> [batch,n,d]; dropout inside it is its own business (config has the probabilities).
   Either says what failed by luna_backend_fail. Examples: examples/attentions. A hook is not saved: the file of such a
   model has no luna.kind, and luna_load_model cannot open it; init the model with the same config and hook, then
   luna_load. */
typedef struct luna_layer_config luna_layer_config;
typedef struct luna_attention_call {
  luna_tensor *x;                    /* [batch,n,d], after the layer's norm when pre-norm */
  luna_tensor *input;                /* what the layer was given: x itself when post-norm; */
  const luna_norm_layer *norm;       /* and the norm between both, or null */
  luna_tensor *p;                    /* the one given to luna_encoder_layer_forward; in the library's models null, or
                                        the layer before's next_p */
  const int32_t *lengths;            /* [batch] or null */
  bool causal;
  luna_tensor *next_p;               /* to hand out: the next layer's p; null leaves p as it is; */
  luna_tensor *kept[4];              /* and what else shall stay until the next begin, as the next segment's memory or
                                        a loss to be added to the model's: the hook's `layer` says where they are */
} luna_attention_call;
typedef struct luna_attention_hook {
  void *(*init)(void *user, luna_params *params, const char *prefix, const luna_layer_config *config);
  luna_tensor *(*forward)(void *layer, luna_attention_call *call);
  void *user;
} luna_attention_hook;

typedef enum luna_recompute_kind {
  LUNA_RECOMPUTE_NONE = 0, LUNA_RECOMPUTE_FFN, LUNA_RECOMPUTE_LAYER
} luna_recompute_kind;

/* Encoder and decoder layers, eq. 6 */
struct luna_layer_config {
  int64_t dim, heads;                /* 0 = 128, 4 */
  int64_t pack_heads;                /* 0 = heads */
  int64_t ffn;                       /* 0 = 4 dim */
  luna_sharing sharing;
  luna_activation activation;        /* of the feed-forward; 0 = LUNA_ACTIVATION_RELU */
  bool gated;                        /* its hidden layer is act(fc1 x) fc3 x: GLU with LUNA_ACTIVATION_SIGMOID, SwiGLU
                                        with LUNA_ACTIVATION_SILU */
  luna_activation omega;             /* of causal attention; 0 = LUNA_ACTIVATION_SOFTPLUS2 */
  bool pre_norm;                     /* default: post-norm */
  int64_t convolution;               /* causal layer: width of the short convolution on attention's input; 0 = none */
  float dropout;                     /* of attention's and the feed-forward's result, before each residual sum; in
                                        models also of embeddings and of a classifier's features */
  float attention_dropout;           /* of attention matrices (encoder: pack and unpack; causal: unpack) */
  float activation_dropout;          /* of the feed-forward's hidden layer, after the activation */
  bool bert_init;
  luna_attention_kind attention;     /* 0 = Luna; encoder and causal layers take the others too */
  luna_linformer_config linformer;
  const luna_attention_hook *hook;   /* or a user-defined attention; must outlive the layer */
  int64_t own_memory;                /* encoder layer: slots of a learned P of its own in place of the incoming one
                                        (the paper's non-contextual P); 0 = none */
  luna_recompute_kind recompute;     /* training: what backward computes again instead of keeping it */
};

typedef struct luna_encoder_layer {
  luna_layer_config config;
  luna_nested_attention_layer attention;
  luna_attention_layer other_attention;        /* softmax, linear, Linformer */
  void *hook_state;                  /* the hook's */
  luna_tensor *memory;               /* "projected_embeddings" [own_memory,d] */
  luna_norm_layer attention_norm, memory_norm, final_norm; /* memory_norm: Luna only */
  luna_linear_layer fc1, fc2, fc3;   /* fc3: gated alone */
} luna_encoder_layer;
LUNA_API luna_status luna_encoder_layer_init(luna_encoder_layer *layer, luna_params *params, const char *prefix,
                                             const luna_layer_config *config);
/* x [batch,n,d], *p [batch,l,d], lengths or null -> X'; *p becomes P'. p may be null with own_memory (then P' is not
   computed) or without Luna attention, where *p stays. */
LUNA_API luna_tensor *luna_encoder_layer_forward(const luna_encoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 const int32_t *lengths);

typedef struct luna_decoder_layer {
  luna_layer_config config;
  luna_causal_attention_layer self_attention;
  luna_nested_attention_layer cross_attention;
  luna_norm_layer self_norm, cross_norm, memory_norm, final_norm;
  luna_linear_layer fc1, fc2, fc3;   /* fc3: gated alone */
} luna_decoder_layer;
LUNA_API luna_status luna_decoder_layer_init(luna_decoder_layer *layer, luna_params *params, const char *prefix,
                                             const luna_layer_config *config);
/* x [batch,n,d], *p [batch,l,d], context = encoder output [batch,m,d] with lengths or null -> X'; *p becomes the next
   P */
LUNA_API luna_tensor *luna_decoder_layer_forward(const luna_decoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 luna_tensor *context, const int32_t *lengths);

/* Decoder-only layer: causal attention (Luna's with a learned memory of its own, of `memory` slots, 0 = 16),
   feed-forward */
typedef struct luna_causal_layer {
  luna_layer_config config;
  luna_tensor *memory;               /* "projected_embeddings" [l,d]; Luna only */
  luna_tensor *kernel;               /* "conv.weight" [d,width], null without */
  luna_tensor *kernel_bias;          /* "conv.bias" [d] */
  luna_causal_attention_layer attention;
  luna_attention_layer other_attention;        /* softmax, linear */
  void *hook_state;                  /* the hook's */
  luna_norm_layer attention_norm, final_norm;
  luna_linear_layer fc1, fc2, fc3;   /* fc3: gated alone */
} luna_causal_layer;
LUNA_API luna_status luna_causal_layer_init(luna_causal_layer *layer, luna_params *params, const char *prefix,
                                            int64_t memory, const luna_layer_config *config);
LUNA_API luna_tensor *luna_causal_layer_forward(const luna_causal_layer *layer, luna_tensor *x);

/* ---------------------------------------------------------------------------------------------------------------------
   >>models: config, init, forward of a luna_input. Inits and loads fail as those of layers do.
   ------------------------------------------------------------------------------------------------------------------ */
/* Causal language model: embedding, causal layers, logits tied to the embedding. Of features or with outputs of its own
   it finds classes or values at each step: a detector, a forecaster. */
typedef struct luna_lm_config {
  int64_t vocab;                     /* 0 = 256, bytes */
  int64_t features;                  /* numbers a step, in place of tokens; 0 = tokens */
  int64_t outputs;                   /* a step, by a matrix of their own; 0 = the next token's logits, or of features as
                                        many as features */
  int64_t layers;                    /* 0 = 2 */
  int64_t dim, heads, ffn;           /* of every layer; 0 = 128, 4, 4 dim */
  int64_t memory;                    /* l; 0 = 16 */
  luna_layer_config layer;           /* everything else of the layers; attention: Luna, softmax, linear, or a hook */
  luna_positions positions;          /* 0 = none */
  int64_t max_length;                /* learned positions: the longest sequence; 0 = 512 */
} luna_lm_config;
typedef struct luna_lm {
  luna_lm_config config;
  luna_params *params;
  luna_tensor *embedding;            /* "embed_tokens.weight" [vocab,d], or, of features, null and */
  luna_input_layer input;            /* "input_norm", "input_proj" */
  luna_tensor *positions;            /* "embed_positions.weight" [max_length,d], learned only */
  luna_causal_layer *layers;         /* "layers.N." */
  luna_norm_layer norm;              /* "layer_norm", pre-norm only */
  luna_linear_layer output;          /* "output_projection" [outputs,d], with outputs only */
} luna_lm;
#ifndef LUNA_ONLY_STREAM
LUNA_API luna_status luna_lm_init(luna_lm *model, luna_params *params, const luna_lm_config *config);
/* Logits [batch,n,vocab], or [batch,n,outputs]. No place reads a later one, so lengths have no effect: leave them null
   (with features they say what is padding, which then counts as missing). */
LUNA_API luna_tensor *luna_lm_forward(const luna_lm *model, const luna_input *input);
/* The mean loss of those logits by labels [batch,n], the next token of each place (the caller shifts) or, with
   .outputs, its class; negative labels are ignored: -1 for padding. As luna_cross_entropy finds it, up to rounding, but
   of a large vocabulary no logits are stored (luna_linear_cross_entropy). */
LUNA_API luna_tensor *luna_lm_loss(const luna_lm *model, const luna_input *input, const int32_t *labels);

/* Encoder: embeddings and encoder layers; part of the models below */
/* default: sqrt(dim), but one with learned positions */
typedef enum luna_embedding_scale {
  LUNA_EMBEDDING_SCALE_DEFAULT = 0, LUNA_EMBEDDING_SCALE_ONE, LUNA_EMBEDDING_SCALE_SQRT_DIM
} luna_embedding_scale;
typedef struct luna_encoder_config {
  int64_t features;                  /* numbers a step, in place of tokens; 0 = tokens */
  int64_t layers;                    /* 0 = 2 */
  int64_t dim, heads, ffn;           /* of every layer; 0 = 128, 4, 4 dim */
  int64_t memory;                    /* l; 0 = 16. A batch of shorter sequences uses the first min(l, longest) slots */
  luna_positions positions;          /* 0 = sinusoidal */
  int64_t max_length;                /* learned positions, Linformer: the longest sequence; 0 = 512 */
  int64_t first_position;            /* of the first token; the authors' is padding index + 1 */
  luna_embedding_scale embedding_scale; /* s in x = s E[token] + position; features are not scaled, P is */
  bool norm_embedding;               /* layer norm on both embeddings */
  bool tied_layers;                  /* one layer, applied `layers` times */
  bool own_memory;                   /* each layer has its own learned P (the paper's non-contextual P) */
  bool keep_padding;                 /* keep the outputs at padded places (the authors' translation model); default:
                                        zeros */
  luna_layer_config layer;           /* everything else of the layers; own_memory and linformer.max_length come from
                                        above */
} luna_encoder_config;
typedef struct luna_encoder {
  luna_encoder_config config;
  luna_params *params;
  luna_tensor *embedding;            /* "embed_tokens.weight" [vocab,d], or, of features, null and */
  luna_input_layer input;            /* "input_norm", "input_proj" */
  luna_tensor *positions;            /* "embed_positions.weight" [first_position + max_length,d], learned only */
  luna_tensor *memory;               /* "projected_embeddings" [l,d], Luna only */
  luna_norm_layer embedding_norm, memory_embedding_norm; /* "emb_layer_norm", "proj_emb_layer_norm" */
  luna_encoder_layer *layers;        /* "layers.N." */
  luna_norm_layer norm, memory_norm; /* "layer_norm", "proj_layer_norm", pre-norm only */
} luna_encoder;
LUNA_API luna_status luna_encoder_init(luna_encoder *encoder, luna_params *params, const char *prefix, int64_t vocab,
                                       const luna_encoder_config *config); /* vocab 0 = 256, bytes; not of features */
/* The layers' input -> X [batch,n,d]; *p, when null, becomes the learned P [batch,l,d] */
LUNA_API luna_tensor *luna_encoder_embed(const luna_encoder *encoder, const luna_input *input, luna_tensor **p);
/* -> X [batch,n,d]; *p in: null, or the memory that the segment before left (luna_detach stops its gradient; luna_read
   and luna_tensor_new carry it over a begin); *p out: the memory that this segment leaves [sections 5, 6]. p may be
   null. */
LUNA_API luna_tensor *luna_encoder_forward(const luna_encoder *encoder, const luna_input *input, luna_tensor **p);

/* Classifier, also of each step, and with another loss (luna_mse) regression: then a class is a value */
typedef enum luna_pooling {
  LUNA_POOLING_DEFAULT = 0,          /* the memory, or without one the mean */
  LUNA_POOLING_CLS,                  /* X[0] */
  LUNA_POOLING_MEAN,                 /* mean of X over real tokens */
  LUNA_POOLING_MEMORY,               /* mean of P over each sequence's min(l, length) real slots [version 2, table 3] */
  LUNA_POOLING_MEMORY_BATCH             /* mean of P over the batch's min(l, longest) slots: the authors' */
} luna_pooling;
typedef struct luna_classifier_config {
  int64_t vocab;                     /* 0 = 256, bytes */
  int64_t features;                  /* or encoder.features; 0 = tokens */
  int64_t classes;                   /* 0 = 2 */
  luna_pooling pooling;
  int64_t pre_logits;                /* width of a GELU layer before the logits; 0 = none */
  bool pair;                         /* two sequences: features a, b, ab, a - b */
  bool per_step;                     /* logits of every step, from X; nothing is pooled */
  luna_encoder_config encoder;
} luna_classifier_config;
typedef struct luna_classifier {
  luna_classifier_config config;
  luna_params *params;
  luna_encoder encoder;              /* "encoder." */
  luna_linear_layer pre_logits;      /* "pre_logits.0" */
  luna_tensor *projection;           /* "sentence_projection_layer.weight" [classes, features] */
} luna_classifier;
LUNA_API luna_status luna_classifier_init(luna_classifier *model, luna_params *params,
                                          const luna_classifier_config *config);
/* -> logits [batch,classes], or of every step [batch,n,classes]; they do not depend on the batch (but by
   LUNA_POOLING_MEMORY_BATCH) */
LUNA_API luna_tensor *luna_classifier_forward(const luna_classifier *model, const luna_input *input);
/* of one batch */
LUNA_API luna_tensor *luna_classifier_forward_pair(const luna_classifier *model, const luna_input *first,
                                                   const luna_input *second);
/* The head alone: what luna_encoder_forward made of one sequence -> features [batch,d]. That of x and p which the model
   does not pool may be null. */
LUNA_API luna_tensor *luna_classifier_pool(const luna_classifier *model, luna_tensor *x, luna_tensor *p,
                                           const int32_t *lengths);

/* Masked language model: encoder, head LN(gelu(x Wd)) E^T + b */
typedef struct luna_masked_lm_config {
  int64_t vocab;                     /* 0 = 257: bytes, and 256 for the mask; of features: the classes that are found */
  int64_t features;                  /* or encoder.features; 0 = tokens */
  luna_encoder_config encoder;
} luna_masked_lm_config;
typedef struct luna_masked_lm {
  luna_masked_lm_config config;
  luna_params *params;
  luna_encoder encoder;              /* "encoder." */
  luna_linear_layer dense;           /* "lm_head.dense" */
  luna_norm_layer norm;              /* "lm_head.layer_norm" */
  luna_tensor *output;               /* the encoder's embedding or, of features, "lm_head.weight" [vocab,d] */
  luna_tensor *bias;                 /* "lm_head.bias" [vocab] */
} luna_masked_lm;
LUNA_API luna_status luna_masked_lm_init(luna_masked_lm *model, luna_params *params,
                                         const luna_masked_lm_config *config);
/* logits [batch,n,vocab] */
LUNA_API luna_tensor *luna_masked_lm_forward(const luna_masked_lm *model, const luna_input *input);
/* Mean loss over the places whose label is not negative; logits are made for those alone */
/* labels [batch,n] */
LUNA_API luna_tensor *luna_masked_lm_loss(const luna_masked_lm *model, const luna_input *input, const int32_t *labels);
typedef struct luna_masking {
  float probability;                 /* of a place to be chosen; 0 = 0.15 */
  int32_t mask, vocab;               /* the mask's token; random tokens are below vocab, 0 = below mask; both 0 = 256 */
  uint64_t seed, step;               /* the same again for the same seed, step and place */
} luna_masking;
/* The task: of the chosen places 80% become the mask, 10% a random token, 10% stay; labels are the tokens there and -1
   elsewhere [arXiv 1810.04805]. masked and labels [batch,n]; masked may be input->tokens itself. Null masking: the
   defaults. Returns how many were chosen. */
LUNA_API int64_t luna_mask_tokens(const luna_masking *masking, const luna_input *input, int32_t *masked,
                                  int32_t *labels);

/* Encoder-decoder */
typedef struct luna_seq2seq_config {
  int64_t vocab;                     /* of the source; 0 = 256, bytes */
  int64_t features;                  /* of the source, or encoder.features; 0 = tokens. The target is of tokens */
  int64_t target_vocab;              /* 0 = vocab */
  bool share_embeddings;             /* one embedding for source, target and output; vocab = target_vocab */
  bool separate_output;              /* logits by a matrix of their own; default: tied to the target's embedding */
  int64_t decoder_layers;            /* 0 = encoder.layers */
  int64_t max_target_length;         /* learned positions; 0 = encoder.max_length */
  /* its layer config is the decoder's too; attention: Luna. Default scale: sqrt(dim) */
  luna_encoder_config encoder;
} luna_seq2seq_config;
typedef struct luna_seq2seq {
  luna_seq2seq_config config;
  luna_params *params;
  luna_encoder encoder;              /* "encoder." */
  luna_tensor *embedding;            /* "decoder.embed_tokens.weight" [target_vocab,d], or the encoder's */
  luna_tensor *positions;            /* "decoder.embed_positions.weight", learned only */
  luna_decoder_layer *layers;        /* "decoder.layers.N." */
  /* "decoder.layer_norm", "decoder.proj_layer_norm" (which nothing reads), pre-norm only */
  luna_norm_layer norm, memory_norm;
  luna_tensor *output;               /* "decoder.output_projection.weight" [target_vocab,d], or the embedding */
} luna_seq2seq;
LUNA_API luna_status luna_seq2seq_init(luna_seq2seq *model, luna_params *params, const luna_seq2seq_config *config);
/* source [batch,n], and the target so far [batch,m] (padding gets a zero embedding) -> logits [batch,m,target_vocab] */
LUNA_API luna_tensor *luna_seq2seq_forward(const luna_seq2seq *model, const luna_input *source,
                                           const luna_input *target);

/* Opens the model that a checkpoint describes: init and load in one; params must be empty. The file's sizes are
   checked against its tensors. Not for a model with an attention hook: init it with its config, then luna_load. Any
   kind opens by luna_load_model; luna_lm_load is for those who know that it is a luna_lm. */
typedef enum luna_model_kind {
  LUNA_MODEL_LM = 1, LUNA_MODEL_CLASSIFIER, LUNA_MODEL_MASKED_LM, LUNA_MODEL_SEQ2SEQ
} luna_model_kind;
typedef struct luna_model {
  luna_model_kind kind;              /* which of the members below is initialised */
  luna_lm lm;
  luna_classifier classifier;
  luna_masked_lm masked_lm;
  luna_seq2seq seq2seq;
} luna_model;
LUNA_API luna_status luna_load_model_bytes(luna_model *model, luna_params *params, const void *bytes, size_t size);
LUNA_API luna_status luna_lm_load_bytes(luna_lm *model, luna_params *params, const void *bytes, size_t size);
#ifndef LUNA_NO_STDIO
LUNA_API luna_status luna_load_model(luna_model *model, luna_params *params, const char *path);
LUNA_API luna_status luna_lm_load(luna_lm *model, luna_params *params, const char *path);
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>trainer
   ------------------------------------------------------------------------------------------------------------------ */
#ifndef LUNA_NO_TRAIN
/* A factor on the learning rate, a pure function of the step (from 1): linear warm-up, then a decay. */
typedef enum luna_decay {
  LUNA_DECAY_CONSTANT = 0, LUNA_DECAY_INVERSE_SQRT, LUNA_DECAY_LINEAR, LUNA_DECAY_COSINE, LUNA_DECAY_MILESTONES
} luna_decay;
typedef struct luna_schedule {
  luna_decay decay;
  int64_t warmup;                    /* steps from warmup_from to 1 */
  int64_t total;                     /* linear, cosine: the step that reaches `floor` */
  float floor;                       /* the smallest factor */
  float warmup_from;                 /* the factor at step 0 */
  int64_t milestone[4];              /* steps after each of which the factor is multiplied by gamma; 0 = no more */
  float gamma;                       /* 0 = 0.1 */
} luna_schedule;
LUNA_API float luna_schedule_at(const luna_schedule *schedule, int64_t step); /* null: constant, 1 */

typedef struct luna_optimizer luna_optimizer;
typedef struct luna_sgd_config {
  float lr;                          /* 0 = 0.01 */
  float momentum;
  bool nesterov;
  float weight_decay;                /* added to the gradient */
  float clip;                        /* max global gradient norm; 0 = none */
  luna_schedule schedule;
  int64_t max_skips;                 /* skips in a row after which a step is LUNA_NOT_FINITE; 0 = 10, negative =
                                        never */
} luna_sgd_config;
typedef struct luna_adamw_config {   /* arXiv 1412.6980, 1711.05101 */
  float lr;                          /* 0 = 1e-3 */
  float beta1, beta2;                /* 0 = 0.9, 0.999 */
  float epsilon;                     /* 0 = 1e-8 */
  float weight_decay;                /* AdamW: decoupled; Adam: added to the gradient; 0 = none */
  float clip;                        /* max global gradient norm; 0 = none */
  luna_schedule schedule;
  int64_t max_skips;                 /* 0 = 10, negative = never */
} luna_adamw_config;
typedef luna_adamw_config luna_adam_config;
typedef struct luna_apollo_config {  /* arXiv 2009.13586 */
  float lr;                          /* 0 = 1 */
  float beta;                        /* 0 = 0.9 */
  float epsilon;                     /* 0 = 1e-4 */
  float weight_decay;                /* added to the gradient */
  float clip;
  /* its steps count from 0 here; warmup 0 = 100 (Apollo needs one), warmup_from 0 = 0.01 */
  luna_schedule schedule;
  int64_t max_skips;                 /* 0 = 10, negative = never */
} luna_apollo_config;
/* Of all parameters of the set; those made later join at the next step, as if no loss had reached them before. Freed
   with the context. Null config: defaults. */
LUNA_API luna_optimizer *luna_sgd(luna_params *params, const luna_sgd_config *config);
LUNA_API luna_optimizer *luna_adam(luna_params *params, const luna_adam_config *config);
LUNA_API luna_optimizer *luna_adamw(luna_params *params, const luna_adamw_config *config);
LUNA_API luna_optimizer *luna_apollo(luna_params *params, const luna_apollo_config *config);

/* A group: parameters that learn in another way than the config says, those that join later included.
   { .max_rank = 1 }: no decay on norms and biases. */
typedef struct luna_param_group {
  const char *name;                  /* whose name has this in it; null = any */
  int max_rank;                      /* and of at most so many axes; 0 = any */
  float lr;                          /* factor on the learning rate; 0 = 1 */
  float weight_decay;                /* in place of the config's; 0 = none */
  bool frozen;                       /* not trained at all; their gradients are ignored */
} luna_param_group;
/* the last that fits a parameter counts */
LUNA_API luna_status luna_optimizer_group(luna_optimizer *optimizer, const luna_param_group *group);

/* Uses and zeroes the gradients; a parameter that has none, which no luna_backward has reached, stays as it is: weight
   decay does not change it either. When a call since the last begin failed, or there was no luna_backward since this
   optimiser's last step, it changes nothing and returns that failure: gradients come from luna_backward alone. A NaN or
   Inf in the loss or among the gradients skips the update: parameters stay as they are, the next luna_item or luna_read
   reports it to options.log, and luna_optimizer_skipped counts. From max_skips such steps in a row on it returns
   LUNA_NOT_FINITE, until one is good; on a device by what luna_item or luna_read found last. */
LUNA_API luna_status luna_optimizer_step(luna_optimizer *optimizer);
/* Its two halves: advance sets the step's learning rate, apply does the rest, with the gradients as they are. */
LUNA_API luna_status luna_optimizer_advance(luna_optimizer *optimizer);
LUNA_API luna_status luna_optimizer_apply(luna_optimizer *optimizer);
LUNA_API luna_status luna_optimizer_set_lr(luna_optimizer *optimizer, float lr);
/* of the last step, with its schedule; before any, of the first */
LUNA_API float luna_optimizer_lr(const luna_optimizer *optimizer);
LUNA_API int64_t luna_optimizer_steps(const luna_optimizer *optimizer);   /* updates made; skipped ones do not count */
LUNA_API int64_t luna_optimizer_skipped(const luna_optimizer *optimizer); /* updates skipped as not finite */
LUNA_API float luna_optimizer_norm(const luna_optimizer *optimizer); /* global gradient norm of the last step */

/* Exact resume: parameters, the optimiser's moments and counters, the context's seed and step. A run loaded from it
   goes on with the same bits. The file is a checkpoint of the model as well. The position in the data is the
   caller's: luna_params_set before, luna_params_get after. Call it after luna_optimizer_step: gradients are not
   saved, and are zero after loading. Load into an optimiser of the same kind (checked) and config (not checked, as not
   saved). */
LUNA_API luna_status luna_save_training_io(const luna_optimizer *optimizer, const luna_io *io);
LUNA_API luna_status luna_load_training_bytes(luna_optimizer *optimizer, const void *bytes, size_t size);
#ifndef LUNA_NO_STDIO
LUNA_API luna_status luna_save_training(const luna_optimizer *optimizer, const char *path);
LUNA_API luna_status luna_load_training(luna_optimizer *optimizer, const char *path);
#endif
#endif

#endif /* !LUNA_ONLY_STREAM */
#ifdef LUNA_ONLY_STREAM
#pragma pop_macro("LUNA_API")
#endif
#endif /* LUNAI_REST_H */

#ifndef LUNAI_STREAM_H
#define LUNAI_STREAM_H
/* ---------------------------------------------------------------------------------------------------------------------
   >>stream: a causal language model with Luna attention, one token at a time, in constant memory
   A stream only reads its weights: one thread a stream, any number of streams on one model. The stream of a model on a
   device is stored and runs there, only tokens and logits are copied: it is used by the thread of its model's context,
   its work is queued on that context's stream, and it is closed before that context is. When the device fails, a step
   returns null, and so do all later ones. A saved state loads on host and device alike.
   ------------------------------------------------------------------------------------------------------------------ */
typedef struct luna_stream luna_stream;
typedef struct luna_stream_config {
  int64_t batch;                     /* sequences side by side; 0 = 1 */
  int64_t chunk;                     /* rows of a prefill done at once; 0 = 64 */
  luna_isa isa;                      /* 0 = best; not on a device */
} luna_stream_config;
/* From a safetensors checkpoint in memory, F32, 4-byte aligned, little-endian host, read in place: no context, no
   allocator. memory: luna_stream_size bytes. Null when something is wrong: *error then says what. */
LUNA_API size_t luna_stream_size(const void *bytes, size_t size, const luna_stream_config *config, const char **error);
LUNA_API luna_stream *luna_stream_open_bytes(const void *bytes, size_t size, const luna_stream_config *config,
                                             void *memory, size_t memory_size, const char **error);
#ifndef LUNA_ONLY_STREAM
/* Of a model with Luna attention. Open it after training: it copies what it folds (luna_form) of the weights, and reads
   the others in place. Memory from the model's context's allocator, on a device from the device: all at once, a step
   takes none. Null: the context says why. */
LUNA_API luna_stream *luna_stream_open(const luna_lm *model, const luna_stream_config *config);
#endif
LUNA_API void luna_stream_close(luna_stream *stream); /* null is fine; on the CPU also after the model's context */
/* One token a sequence ([batch]) -> logits [batch, vocab], valid until the next call; null for a token out of range */
LUNA_API const float *luna_stream_step(luna_stream *stream, const int32_t *tokens);
/* Of a model of features: [batch, features], NaN where one is missing -> [batch, outputs], valid until the next call */
LUNA_API const float *luna_stream_step_features(luna_stream *stream, const float *features);
/* batch: the stream's, or 0; lengths must be null -> logits after the last */
LUNA_API const float *luna_stream_prefill(luna_stream *stream, const luna_input *input);
LUNA_API const char *luna_stream_error(const luna_stream *stream);   /* "" when the last call was fine */
LUNA_API luna_error_id luna_stream_error_id(const luna_stream *stream); /* the id of that sentence; LUNA_ERROR_NONE */
LUNA_API int64_t luna_stream_position(const luna_stream *stream);    /* tokens so far */
LUNA_API void luna_stream_reset(luna_stream *stream);
/* sequence b continues from[b] (beam search) */
LUNA_API luna_status luna_stream_reorder(luna_stream *stream, const int32_t *from);
/* the state; same model sizes and batch, not between two devices' contexts */
LUNA_API luna_status luna_stream_copy(luna_stream *to, const luna_stream *from);
/* bytes of a saved state: this machine's byte order */
LUNA_API size_t luna_stream_state_size(const luna_stream *stream);
LUNA_API luna_status luna_stream_state_save(const luna_stream *stream, void *bytes, size_t size);
LUNA_API luna_status luna_stream_state_load(luna_stream *stream, const void *bytes, size_t size);

typedef struct luna_sampling {
  float temperature;                 /* logits are divided by it; 0 = 1: for greedy choice set top_k = 1 */
  int32_t top_k;                     /* 0 = all; 1 = greedy */
  float top_p;                       /* of these the likeliest whose probabilities reach it; 0 = 1, all
                                        [arXiv 1904.09751] */
  uint64_t seed;
  uint64_t drawn;                    /* numbers drawn so far; luna_sample counts */
} luna_sampling;
/* -1 for null logits or NaN, where temperature or top_k is negative or not finite, and top_p outside 0..1 */
LUNA_API int32_t luna_sample(const float *logits, int64_t vocab, luna_sampling *sampling);

#ifndef LUNA_ONLY_STREAM
/* The decoder of an encoder-decoder as a stream, `beam` sequences for each source (sequence b beam + i continues source
   b): the sources are encoded and packed here, once, and then a token costs the same at any length. Begins an inference
   on the model's context. beam: 0 = 1. */
LUNA_API luna_stream *luna_seq2seq_stream_open(const luna_seq2seq *model, const luna_input *source, int64_t beam);
typedef struct luna_beam_config {
  int32_t begin, end;                /* the token a target starts from, and the one that ends it */
  int64_t beam;                      /* 0 = 1, greedy */
  int64_t max_length;                /* tokens of a result, its end not counted; 0 = 2 n + 10 */
  /* a result's score is its log-probability / (tokens with its end)^penalty; 0 = 1; negative = none */
  float length_penalty;
  /* go on until no unfinished sequence can win; default: stop when `beam` results are there */
  bool exhaustive;
} luna_beam_config;
/* Greedy or beam search. source [batch,n] -> out [batch,max_length] with out_lengths [batch], without begin and end;
   scores [batch] or null */
LUNA_API luna_status luna_seq2seq_generate(const luna_seq2seq *model, const luna_beam_config *search,
                                           const luna_input *source, int32_t *out,
                                           int32_t *out_lengths, float *scores);

#endif
#endif /* LUNAI_STREAM_H */

/* ---------------------------------------------------------------------------------------------------------------------
   >>backend: the table of functions that a device implements
   An entry runs one kind of op: it gets the op with its tensors (pointer, dtype, device, shape; contiguous) and returns
   a status. It takes and returns no host value that changes from step to step: those are in luna_step_state, in backend
   memory. Entries of tier 2 may be null: the op is then composed from tier 1.
   ------------------------------------------------------------------------------------------------------------------ */
#if (!defined(LUNA_ONLY_STREAM) || defined(LUNA_IMPLEMENTATION)) && !defined(LUNAI_REST_H)
#define LUNAI_REST_H
#ifdef LUNA_ONLY_STREAM
#pragma push_macro("LUNA_API")
#undef LUNA_API
#define LUNA_API LUNAI_PRIVATE
#endif
/* R(name, tier, reads, cheap), and E of LUNA_ELEMENTWISE. reads: the data that backward reads, of inputs and results;
   parameters are always there. cheap: backward reads no result, and forward takes so little time that a result which
   backward needs elsewhere is computed again instead of kept. */
#define LUNA_OPS(R, E) \
  R(PERMUTE, 1, 0, false) \
  R(SLICE, 1, 0, false) \
  R(CONCAT, 1, 0, false) \
  R(EXPAND, 1, 0, false) \
  LUNA_ELEMENTWISE(E) \
  R(SCALE, 1, 0, true) \
  R(REDUCE, 1, 0, false) \
  R(MAX, 1, LUNA_READS_IN(0), false) \
  R(CUMSUM, 1, 0, false) \
  R(MATMUL, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false) \
  R(LINEAR, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false) \
  R(ACTIVATION, 1, LUNA_READS_IN(0), true) \
  R(SOFTMAX, 1, LUNA_READS_OUT(0), false) \
  R(MASK, 1, 0, true) \
  R(RATIO, 1, LUNA_READS_IN(0) | LUNA_READS_OUT(0), false) \
  R(DROPOUT, 1, 0, true) \
  R(LAYER_NORM, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), true) \
  R(EMBEDDING, 1, 0, true) \
  R(SCATTER_ADD, 1, 0, false) \
  R(SINUSOIDS, 1, 0, true) \
  R(CROSS_ENTROPY, 1, LUNA_READS_IN(0), false) \
  R(SOFTMAX_ATTENTION, 1, \
    LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2) | LUNA_READS_OUT(0) | LUNA_READS_OUT(1), false) \
  R(CAUSAL_PRODUCT, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2), false) \
  R(SHORT_CONVOLUTION, 1, LUNA_READS_IN(0) | LUNA_READS_IN(1), false) \
  R(CUSTOM, 1, 0xffff, false) \
  R(PACK, 2, LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_OUT(0) | LUNA_READS_OUT(1), false) \
  R(UNPACK, 2, LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2) | LUNA_READS_IN(3), false) \
  R(CAUSAL_LUNA, 2, LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2) | LUNA_READS_IN(3), false) \
  R(FEED_FORWARD, 2, LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2) | LUNA_READS_IN(3), false) \
  R(LINEAR_CROSS_ENTROPY, 2, LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2), false) \
  R(SPARSE_ATTENTION, 2, \
    LUNA_READS_IN(0) | LUNA_READS_IN(1) | LUNA_READS_IN(2) | LUNA_READS_OUT(0) | LUNA_READS_OUT(1), false)
typedef enum luna_op_kind {
#define LUNAI_OP_KIND(name, tier, reads, cheap) LUNA_OP_##name,
#define LUNAI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) LUNA_OP_##name,
  LUNA_OPS(LUNAI_OP_KIND, LUNAI_OP_EACH)
#undef LUNAI_OP_EACH
#undef LUNAI_OP_KIND
  LUNA_OP_COUNT
} luna_op_kind;

#define LUNA_MAX_INPUTS 8
typedef struct luna_op {
  luna_op_kind kind;
  int inputs, outputs;
  luna_tensor *in[LUNA_MAX_INPUTS];  /* null where an optional input is absent */
  luna_tensor *out[2];
  const int32_t *index;              /* tokens or labels, in backend memory */
  const int32_t *lengths, *query_offsets, *key_offsets;
  union {                            /* the arguments of its kind, where it has any */
    struct { int64_t axes[LUNA_MAX_RANK]; } permute;
    struct { int64_t axis, start; } slice;
    struct { int64_t axis; } concat;
    struct { int64_t count; } expand;
    struct {                         /* LUNA_ELEMENTWISE: the result as [shape], axes joined where that is possible; */
      int64_t shape[LUNA_MAX_RANK], stride[3][LUNA_MAX_RANK]; /* each input's strides in it, 0 where it repeats; */
      float scalar[3];               /* a number in place of an input that is null; */
      int input;                     /* backward: the input whose gradient is being computed */
    } elementwise;
    struct { float factor; } scale;
    struct {                         /* reduce, max, cumsum: [outer, axis, inner]; factor 1, or 1/axis for the mean */
      int64_t outer, axis, inner;
      float factor;
    } reduce;
    struct { bool rms; } norm;
    struct { int64_t first; } sinusoids; /* the position of the result's first row */
    struct { int64_t width; float fill; } mask; /* floats a row; what masked rows become */
    /* a: outer * inner matrices, b: inner */
    struct { int64_t outer, inner, m, n, k; bool transpose_a, transpose_b; } matmul;
    struct { bool recompute; } feed_forward;
    /* and linear cross-entropy: factor 1, or 1 / labels that count */
    struct { float smoothing, factor; } cross_entropy;
    struct {
      int64_t heads, batch, queries, keys;
      float scale;
      bool causal;
      const luna_attention_pattern *patterns; /* of sparse attention, in host memory */
      int64_t pattern_count;
    } attention;                     /* softmax attention, sparse attention, pack */
    struct { int64_t heads; float scale; } causal; /* causal product, causal Luna */
  } arg;
  float dropout;                     /* 0 outside training */
  uint32_t dropout_op;               /* this op's number among those of the step that drop */
  float last_dropout;                /* of the result, before a residual is added: a second drop of the same op, */
  uint32_t last_dropout_op;          /* with a number of its own */
  luna_activation activation;
  bool training;                     /* keep what backward needs: this op is on the tape */
  int sets;                          /* backward: bits of the inputs whose gradient is to be set, not added to */
  /* LINEAR, backward: the CROSS_ENTROPY op that alone reads out[0] (or a reshape), whose gradient is not stored; query
     is asked again; or null */
  struct luna_op *loss;
  /* Streaming: the state of CAUSAL_LUNA and SHORT_CONVOLUTION after the rows before these, which forward reads and
     updates; else null */
  /* [batch, heads, head_dim, slots], [batch, heads, slots, head_dim]: means of k^T A and A^T v over `position` rows */
  double *mean_ka, *mean_av;
  const int64_t *position;           /* in backend memory; where it is 0 the means count as 0, and are not read */
  float *history;                    /* [batch, width - 1, d]: the convolution's last inputs */
  bool dots;                         /* a stream's single rows: products by the decoding kernels */
  void *kept;                        /* kept_size bytes, from forward to backward */
  void *workspace;                   /* during one call */
  size_t kept_size, workspace_size, backward_workspace_size;
  luna_custom custom;
  luna_ctx *ctx;
  struct luna_op *previous, *next;   /* the tape */
  int64_t number;                    /* on the tape */
  struct luna_op *recompute_from;    /* of the newest op of a recomputed scope: its oldest */
  struct lunai_piece *kept_piece;    /* where kept lies */
  bool kept_again;                   /* kept was released and computed again */
} luna_op;

/* What an op's functions can do (luna_op_functions.can); of inputs that are one tensor only ADDS_IN_PLACE is asked. */
#define LUNA_SETS_GRAD(i) (1 << (i))         /* backward sets in[i]'s gradient where luna_op.sets has bit i */
/* in[i] is only added to the result: its gradient may be out[0]'s, unchanged */
#define LUNA_GRAD_IN_PLACE(i) (256 << (i))
/* in[i] may be that input too: its part is added there, and not read again */
#define LUNA_ADDS_IN_PLACE(i) (65536 << (i))
#define LUNA_FORWARD_IN_PLACE (1 << 24)      /* forward may write the result where in[0] lies */
/* of LUNA_ELEMENTWISE */
#define LUNA_EACH_IN_PLACE(cheap) ((cheap) ? LUNA_GRAD_IN_PLACE(0) | LUNA_FORWARD_IN_PLACE : 0)
#define LUNA_TAKES_LOSS (1 << 25)            /* LINEAR: backward can take luna_op.loss in place of out[0]'s gradient */
#define LUNA_SETS_IN_PLACE (1 << 26)         /* backward sets in[0]'s gradient, which may lie where out[0]'s does */

typedef struct luna_op_functions {
  void (*query)(luna_op *op);        /* sets kept_size, workspace_size and backward_workspace_size */
  luna_status (*forward)(luna_op *op);
  luna_status (*backward)(luna_op *op); /* adds to in[i]->grad, or sets it, where that is not null, from out[]->grad */
  int can;                           /* 0, or bits of the above */
} luna_op_functions;

typedef struct luna_step_state {     /* what changes from step to step, in backend memory */
  uint64_t seed;
  uint64_t step;                     /* begin_step calls; the Philox counter's last word */
  /* optimiser steps made, and skipped for a NaN or Inf (in the context's own state: by all its optimisers) */
  uint64_t updates, skipped;
  float lr, factor, norm;            /* this step's learning rate, clip factor, gradient norm */
  int nonfinite;
  uint64_t skipped_in_row;           /* an optimiser's: up to its last step */
} luna_step_state;

typedef enum luna_optimizer_kind {
  LUNA_OPTIMIZER_SGD = 0, LUNA_OPTIMIZER_ADAM, LUNA_OPTIMIZER_ADAMW, LUNA_OPTIMIZER_APOLLO
} luna_optimizer_kind;
/* An optimiser's step of many parameters at once: the rule of all, and each one's part. In the table of all parts
   parameters are cut into pieces of LUNA_UPDATE_PIECE elements, which are numbered. */
#define LUNA_UPDATE_PIECE 16384
typedef struct luna_rule {           /* reads and writes the state */
  luna_optimizer_kind kind;
  bool nesterov;
  float momentum, beta1, beta2, epsilon, clip;
  luna_step_state *state;
} luna_rule;
typedef struct luna_update {
  float *value, *grad;
  /* SGD: momentum; Adam: of the gradient and its square; Apollo: gradient, curvature, last direction. Or null */
  float *moment[3];
  int64_t count, first;              /* elements; the number of its first piece */
  float decay, lr;                   /* lr: factor on the state's */
  bool frozen;                       /* its gradient is zeroed, and counts for nothing */
} luna_update;

struct luna_backend {
  uint32_t version, size;            /* 1, sizeof(luna_backend) */
  int device;
  size_t opened;                     /* bytes that `open` takes of the device, for luna_memory */
  /* what one context needs of the device; null: nothing. When it fails (luna_backend_fail says why) the context exists
     and every call in it fails with that sentence */
  luna_status (*open)(luna_ctx *ctx, int device, void **self);
  void (*close)(void *self);
  /* memory the host cannot read, aligned to 256 bytes; null: the context's allocator serves */
  void *(*allocate)(void *self, size_t bytes);
  void (*release)(void *self, void *pointer, size_t bytes);
  /* 0 within (never overlapping), 1 to the device, 2 to the host */
  luna_status (*copy)(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction);
  luna_status (*zero)(luna_ctx *ctx, void *at, size_t bytes);
  luna_status (*wait)(luna_ctx *ctx, const luna_ctx *other); /* of one device: what ctx queues from now on runs after
                                        what `other` has queued; null: work is done when a call returns */
  /* counts a training step; `stepped`: clears nonfinite */
  luna_status (*begin)(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped);
  /* sets nonfinite when the loss is */
  luna_status (*check)(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state);
  /* of `count` parts, in host memory and in backend memory: sets norm, factor and nonfinite; updates */
  luna_status (*norm)(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table,
                      int64_t count);
  luna_status (*update)(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts, const luna_update *table,
                        int64_t count);
  /* Between record and recorded, calls of ctx's thread are kept instead of run: forward, backward, begin, check, norm,
     update, zero, and copies within the device. run queues what was kept. Null: a device without. */
  luna_status (*record)(luna_ctx *ctx);
  luna_status (*recorded)(luna_ctx *ctx, void **graph); /* null: what was kept is forgotten */
  luna_status (*run)(luna_ctx *ctx, void *graph);
  void (*forget)(void *self, void *graph);
  luna_op_functions op[LUNA_OP_COUNT];
};
LUNA_API const luna_backend *luna_cpu_backend(void);
LUNA_API const char *luna_op_name(luna_op_kind kind);
LUNA_API const luna_backend *luna_backend_of(const luna_ctx *ctx);
LUNA_API void *luna_backend_self(const luna_ctx *ctx);             /* what open made */
LUNA_API luna_step_state *luna_backend_state(const luna_ctx *ctx); /* the context's: seed, step, nonfinite */
/* for an entry's or a hook's `return`: the context's error, if it is the first; its id is LUNA_ERROR_BACKEND */
LUNA_API luna_status luna_backend_fail(luna_ctx *ctx, luna_status status, const char *sentence);
#ifdef LUNA_ONLY_STREAM
#pragma pop_macro("LUNA_API")
#endif
#endif /* LUNA_H */

/* =====================================================================================================================
   2. Implementation
   ================================================================================================================== */
#if (defined(LUNA_IMPLEMENTATION) && !defined(LUNAI_IMPLEMENTED)) || defined(LUNAI_PASS)

#ifndef LUNAI_PASS
/* >>base: shared by every chapter below */

#ifdef __FAST_MATH__
#error "luna.h promises exact results for NaN, Inf and rounding: compile without -ffast-math"
#endif
#include <float.h>
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16 /* 16 widens _Float16 alone */
#error "luna.h promises float32 rounding: compile with -msse2 -mfpmath=sse (32-bit x86) or -fexcess-precision=fast"
#endif
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif
#if defined(__cplusplus) && defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif

#include <math.h>
#include <string.h>

/* Visual C++ takes every intrinsic without a target, and has atomics and CPUID of its own. Checked by a build for
   Windows with gcc and this macro (tests/cross.sh), never yet by that compiler. */
#if defined(_MSC_VER) && !defined(__clang__) && !defined(LUNAI_MSVC)
#define LUNAI_MSVC
#endif
#if defined(__GNUC__) || defined(__clang__)
#define LUNAI_UNUSED __attribute__((unused))
#define LUNAI_CALL static __attribute__((noinline, unused)) /* rare, and used everywhere */
#ifdef __OPTIMIZE__
#define LUNAI_INLINE static inline __attribute__((always_inline, unused))
#else
#define LUNAI_INLINE static inline __attribute__((unused)) /* calls: a third of the time to compile */
#endif
#else
#define LUNAI_UNUSED
#define LUNAI_CALL static
#ifdef LUNAI_MSVC
#define LUNAI_INLINE static __forceinline
#else
#define LUNAI_INLINE static inline
#endif
#endif
#define LUNAI_FN static LUNAI_UNUSED
#ifdef LUNA_ONLY_STREAM
#define LUNAI_ONCE LUNAI_CALL         /* small: one copy */
#else
#define LUNAI_ONCE LUNAI_INLINE
#endif

#ifndef LUNA_ASSERT
#define LUNA_ASSERT(condition) ((void)0)
#endif

#define LUNAI_ALIGN 64             /* every allocation and every part of scratch starts at a multiple of this */
#define LUNAI_KEY_BLOCK 512        /* keys an attention block holds; partial results merge in block order */
#define LUNAI_TILE 64              /* queries of an attention tile; LUNAI_KEY_BLOCK is a multiple */
#define LUNAI_CHUNK 64             /* rows of a causal chunk */
#define LUNAI_KC 512               /* a gemm's terms in registers at a time */
#define LUNAI_KA (LUNAI_KC + 16)   /* between gathered rows of A: no power of two, or they would share cache sets */
#define LUNAI_FLOAT_ROWS 64        /* rows summed in float before double takes over */
#define LUNAI_NC 1024              /* columns of B in panels at a time */
#define LUNAI_TILES_ABREAST 4      /* tiles of a column-major A gathered at a time */
#define LUNAI_SUM_ROWS 256         /* rows of C whose partial sums are kept apart */
#define LUNAI_MAX_THREADS 256
#define LUNAI_NORM_EPSILON 1e-5f   /* of layer norm, the authors' */

LUNAI_INLINE int64_t lunai_min(int64_t a, int64_t b) { return a < b ? a : b; }
LUNAI_INLINE int64_t lunai_max(int64_t a, int64_t b) { return a > b ? a : b; }
LUNAI_INLINE int64_t lunai_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
LUNAI_INLINE size_t lunai_round(size_t bytes) { return (bytes + (LUNAI_ALIGN - 1)) & ~(size_t)(LUNAI_ALIGN - 1); }

LUNAI_INLINE bool lunai_is_finite(float x) { return x - x == 0; }
/* of a layer */
LUNAI_INLINE bool lunai_is_activation(luna_activation a) { return (unsigned)a <= LUNA_ACTIVATION_TANH; }

/* Max elements of an array, so that bytes and sums never wrap; and of a matrix in each thread's scratch. */
#define LUNAI_MAX_COUNT ((int64_t)1 << (sizeof(size_t) < 8 ? 28 : 47))
#define LUNAI_MAX_SCRATCH ((int64_t)1 << (sizeof(size_t) < 8 ? 24 : 38))
/* a * b for sizes; -1 when either is negative or the product passes the limit */
LUNAI_FN int64_t lunai_product(int64_t a, int64_t b, int64_t limit) {
  if ((((uint64_t)a | (uint64_t)b) >> 31) == 0) return a * b > limit ? -1 : a * b; /* no division */
  if (a < 0 || b < 0) return -1;
  if (a == 0 || b == 0) return 0;
  return a > limit / b ? -1 : a * b;
}
LUNAI_FN int64_t lunai_checked(int64_t a, int64_t b) { return lunai_product(a, b, LUNAI_MAX_COUNT); }

/* A memset that stays a call: what compilers put in its place for a struct takes several times as long. */
LUNAI_CALL void lunai_clear(void *at, size_t bytes) {
#if defined(__GNUC__)
  __asm__("" : "+r"(bytes));         /* hides the sizes it is called with, for which gcc takes rep stos */
#endif
  memset(at, 0, bytes);
}

/* memcpy that allows null pointers for 0 bytes */
LUNAI_INLINE void lunai_copy(void *to, const void *from, size_t bytes) { if (bytes) memcpy(to, from, bytes); }

#define LUNAI_LENGTH(table) ((int)(sizeof(table) / sizeof((table)[0])))

/* null stays null, where memory is only counted */
LUNAI_INLINE float *lunai_offset(float *at, int64_t floats) { return at ? at + floats : NULL; }

/* the next `count` floats of a scratch area, kept aligned; the area was sized by the same calls on a null pointer */
LUNAI_INLINE float *lunai_take(char **scratch, int64_t count) {
  char *at = *scratch;
  *scratch = at + lunai_round((size_t)count * sizeof(float));
  return (float *)(void *)at;
}
LUNAI_INLINE int64_t lunai_floats(int64_t count) { return (int64_t)lunai_round((size_t)count * sizeof(float)); }

/* The last `past` rows of those in history and x [rows, d] become the history. */
LUNAI_FN void lunai_history_move(float *history, int64_t past, const float *x, int64_t rows, int64_t d) {
  int64_t i;
  for (i = 0; i < past; i++)
    memcpy(history + i * d, i + rows < past ? history + (i + rows) * d : x + (i + rows - past) * d,
           (size_t)d * sizeof(float));
}

/* A task runs once for each thread in [0, threads); it takes its share of the work by its number, and its own part
   of the scratch. How work is shared out never changes a bit of the result. */
typedef void (*lunai_task)(void *work, int64_t thread, int64_t threads);
typedef struct lunai_parallel { luna_parallel_for run; void *user; int64_t threads; } lunai_parallel;
typedef struct lunai_parallel_call { lunai_task task; void *work; int64_t threads; } lunai_parallel_call;
LUNAI_FN void lunai_parallel_one(void *call, int64_t index) {
  lunai_parallel_call *c = (lunai_parallel_call *)call;
  c->task(c->work, index, c->threads);
}
LUNAI_INLINE int64_t lunai_threads(const lunai_parallel *parallel) {
#ifdef LUNA_ONLY_STREAM
  (void)parallel;
  return 1;
#else
  return parallel && parallel->run && parallel->threads > 1 ? parallel->threads : 1;
#endif
}
LUNAI_FN void lunai_run(const lunai_parallel *parallel, lunai_task task, void *work) {
  lunai_parallel_call call;
  call.task = task;
  call.work = work;
  call.threads = lunai_threads(parallel);
  if (call.threads == 1) task(work, 0, 1);
  else parallel->run(parallel->user, call.threads, lunai_parallel_one, &call);
}
/* thread's contiguous share of `count` items */
LUNAI_INLINE int64_t lunai_share(int64_t count, int64_t thread, int64_t threads) {
  return threads == 1 ? count * thread : count / threads * thread + count % threads * thread / threads;
}

/* Dropout: element e of op `op` in step `step` is dropped when half-word e mod 8 of Philox counter (e/8, op, step)
   under key `seed` is below `threshold` = round(65536 p); what stays is multiplied by `keep` = 1/(1-p). threshold 0: no
   dropout. */
typedef struct lunai_dropout { uint64_t seed; uint32_t op, step; uint32_t threshold; float keep; } lunai_dropout;

/* C = act(alpha A B + bias) (+ C when accumulate), for every one of batch[0] x batch[1] products; all strides in floats
   and resolved; the columns of C and of `pre` (the pre-activation, C's layout, may be null) are contiguous. */
typedef struct lunai_gemm {
  const float *a, *b, *bias;
  const float *b_panels;             /* b in panels, by make_panels, for several products; or null */
  float *c, *pre;
  int64_t m, n, k;
  int64_t a_row, a_column, b_row, b_column, c_row;
  int64_t batch[2], a_batch[2], b_batch[2], c_batch[2];
  float alpha;
  int activation;                    /* luna_activation */
  bool accumulate;
  const float *residual;             /* added, in C's layout; null: none. Without `accumulate`, activation or pre */
  /* few rows, rows of A by rows of B^T: each element a sum by lanes, other bits than without */
  bool dots;
} lunai_gemm;

/* Cross-entropy of `rows` rows of logits, of which columns [first, first + columns) are here. Forward meets the parts
   of a row in order, and with the last one writes loss and lse; backward meets them in any. A negative label is
   ignored. */
/* so far: sum of exp(logit - shift), of logits; the largest logit; that of the label */
typedef struct lunai_row_sums { double exps, logits; float shift, label; } lunai_row_sums;
typedef struct lunai_cross_entropy {
  const float *logits;               /* [rows, columns] in rows of logits_row */
  const int32_t *labels;             /* [rows] */
  int64_t rows, classes, first, columns, logits_row, grad_row;
  float smoothing, factor;           /* factor: of the gradient */
  lunai_row_sums *sums;              /* [rows] from one part to the next; null: one part is all */
  /* [rows]; lse: log-sum-exp of each row, which forward writes (may be null) and backward reads */
  float *loss, *lse;
  float *grad;                       /* [rows, columns] in rows of grad_row; may be the logits themselves */
  bool add;                          /* to what is in grad, which is else set */
} lunai_cross_entropy;
LUNAI_FN lunai_cross_entropy lunai_cross_entropy_rows(const lunai_cross_entropy *all, int64_t first, int64_t last) {
  lunai_cross_entropy a = *all;
  a.rows = last - first;
  if (a.logits) a.logits += first * a.logits_row;
  if (a.labels) a.labels += first;
  if (a.sums) a.sums += first;
  if (a.loss) a.loss += first;
  if (a.lse) a.lse += first;
  if (a.grad) a.grad += first * a.grad_row;
  return a;
}

/* Attention, eq. 1: out = softmax(scale Q K^T) V per head, or the backward of it. Strides resolved; a batch stride 0
   shares. Rows: q, out and the [row, head] arrays lse and sums index row = b * queries + i, or query_offsets[b] + i
   when ragged. */
typedef struct lunai_attention {
  const float *q, *k, *v;
  float *out;
  /* [rows, heads] log-sum-exp of each row's scores; forward writes it (may be null), backward reads it */
  float *lse;
  float *sums;                       /* [rows, heads] row sums of the attention matrix after dropout; may be null */
  int64_t batch, heads, queries, keys, head_dim, value_dim;
  int64_t q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head;
  const int32_t *lengths;            /* [batch] real keys of each batch row; null: all */
  const int32_t *query_offsets, *key_offsets; /* [batch + 1] ragged: first rows; null: padded (both or none) */
  float scale;
  bool causal;                       /* query i sees keys j <= i */
  lunai_dropout dropout;             /* element ((b heads + head) queries + i) keys + j */
  const float *grad_out, *grad_sums; /* backward: out's layout; [rows, heads] or null */
  /* backward adds to these, in q's, k's, v's layout; any may be null; grad_k may equal grad_v */
  float *grad_q, *grad_k, *grad_v;
  const luna_attention_pattern *patterns; /* null: dense */
  int64_t pattern_count;
  const float *grad_lse;             /* backward, with patterns: [rows, heads] or null */
} lunai_attention;

/* Folded unpack: S = X K^T + bias, softmax over each group of l columns (one group a head), out = sum_h softmax_h V_h +
   out_bias. x [batch, rows, dim], k and v [batch, heads, slots, dim], bias [batch, heads, slots], out [batch, rows,
   dim_out = dim], dense. */
typedef struct lunai_unpack {
  const float *x, *k, *bias, *v, *out_bias, *residual; /* out_bias [dim], residual (out's shape, added): or null */
  float *out;
  float *lse;                        /* [batch, rows, heads]; forward writes it unless null, backward reads it */
  int64_t batch, rows, dim, heads, slots;
  const int32_t *lengths;            /* [batch] real slots; null: all */
  lunai_dropout dropout;             /* element ((b heads + head) rows + i) slots + j */
  lunai_dropout last;                /* of the sum, before the residual is added: element of out */
  const float *grad_out;
  /* backward adds; any may be null; grad_x may be grad_out: added in place */
  float *grad_x, *grad_k, *grad_bias, *grad_v, *grad_out_bias;
} lunai_unpack;

/* Causal product, eq. 7: out_t = (1/t) x_t sum_{j<=t} y_j^T z_j per head. x, y [batch, rows, heads, dim], z and out
   [batch, rows, heads, value_dim]; row, head strides resolved, shared by x and y (xy_*), and by z and out (z_*). */
typedef struct lunai_causal {
  const float *x, *y, *z;
  float *out;
  int64_t batch, rows, heads, dim, value_dim;
  int64_t xy_batch, xy_row, xy_head, z_batch, z_row, z_head;
  const float *grad_out;
  float *grad_x, *grad_y, *grad_z;   /* backward adds; any may be null */
} lunai_causal;

/* Causal Luna, section 3.3: A = omega(s), U = f(scale q, k, A), W = softmax over slots of U, out = f(W, A, v).
   q, k, v, out [batch, rows, heads, head_dim] dense; s and w [batch, rows, heads, slots] dense. */
typedef struct lunai_causal_luna {
  const float *q, *k, *v, *s;
  float *out, *w;                    /* w: forward writes it unless null, backward reads it */
  int64_t batch, rows, heads, head_dim, slots;
  const int32_t *lengths;            /* [batch] real memory slots; null: all */
  float scale;
  /* omega: LUNA_ACTIVATION_SOFTPLUS2, LUNA_ACTIVATION_SOFTPLUS or LUNA_ACTIVATION_ELU1 */
  int activation;
  int64_t position;                  /* tokens before row 0 (streaming); 0 without a state */
  /* streaming state, or null: [batch, heads, head_dim, slots], [batch, heads, slots, head_dim] running means of k^T A
     and A^T v over the tokens so far; read and updated by forward */
  double *mean_ka, *mean_av;
  const float *grad_out;
  float *grad_q, *grad_k, *grad_v, *grad_s; /* backward adds; any may be null */
} lunai_causal_luna;

/* The optimisers' host-free state, in backend memory: nothing that changes from step to step passes through an
   argument. */
typedef struct lunai_update {
  float *value, *grad, *moment[3];   /* as in luna_update */
  int64_t count;
  /* factor: gradients times this (clipping) */
  float lr, decay, momentum, beta1, beta2, epsilon, correction1, correction2, factor;
  float alpha, curvature;            /* Apollo's, the same for a whole parameter */
  bool nesterov, coupled;            /* coupled: decay goes into the gradient */
} lunai_update;

/* Where a block of columns is written: partial sums over k to `sum` (C itself where that is safe), finished ones to
   C */
typedef struct lunai_target {
  float *sum, *c, *pre;
  const float *bias, *from;          /* from: added, rows from_row apart; null: none */
  int64_t sum_row, c_row, from_row;
  float alpha;
  int activation;
  bool finish, late;                 /* finish: the last block over k, with an epilogue; late: which adds C last */
} lunai_target;

/* Epilogue of a tile: c = max(lowest, alpha A B + from + bias), columns contiguous; from, bias null: none */
typedef struct lunai_epilogue {
  const float *bias, *from;
  float *c;
  int64_t from_row, c_row;
  float alpha, lowest;
} lunai_epilogue;

/* of one number, the same bits on every machine: >>vector, compiled without SIMD */
LUNAI_FN float lunai_exp1_scalar(float x);
LUNAI_FN float lunai_log1_scalar(float x);
LUNAI_FN float lunai_activation_scalar(int kind, float x);
LUNAI_FN float lunai_slope_scalar(int kind, float x);
LUNAI_FN float lunai_each_scalar(int kind, float a, float b, float c);
LUNAI_FN float lunai_each_slope_scalar(int kind, int input, float a, float b, float c, float g);

#if defined(LUNA_ONLY_STREAM) || defined(LUNA_NO_TRAIN)
#define LUNAI_TRAIN(function) NULL
#else
#define LUNAI_TRAIN(function) function
#endif
#ifdef LUNA_ONLY_STREAM
#define LUNAI_REST(function) NULL
#else
#define LUNAI_REST(function) function
#endif
#ifdef LUNA_NO_TRAIN
#define LUNAI_TRAINS false           /* no tape, no dropout */
#else
#define LUNAI_TRAINS true
#endif

/* Every kernel of an instruction set, as K(result, name, arguments) when streaming needs it, T when only training does,
   R the rest. The pass below defines lunai_<name>_<isa> for each; what a build leaves out is null in its table, and so
   nothing refers to it. */
#define LUNAI_KERNELS(K, R, T) \
  K(size_t, gemm_scratch, (const lunai_gemm *g, int64_t threads)) \
  K(void, gemm, (const lunai_gemm *g, const lunai_parallel *parallel, void *scratch)) \
  R(size_t, panels_bytes, (int64_t n, int64_t k)) \
  R(void, make_panels, (const lunai_gemm *g, const lunai_parallel *parallel, void *panels)) \
  K(void, activate, (int kind, int64_t n, const float *x, float *y)) \
  T(void, activate_backward, (int kind, int64_t n, const float *x, const float *dy, float *dx)) \
  T(void, activate_slope, (int kind, int64_t n, const float *x, const float *dy, float *y)) \
  K(void, add, (int64_t n, const float *a, const float *b, float *y)) \
  K(void, mul, (int64_t n, const float *a, const float *b, float *y)) \
  R(void, elementwise, (int kind, const float *const *x, const int64_t *step, int64_t n, float *y)) \
  T(void, elementwise_slope, (int kind, int input, const float *const *x, const int64_t *step, int64_t n, \
      const float *dy, float *y, bool add)) \
  K(void, scale, (int64_t n, float factor, const float *x, float *y)) \
  R(void, scale_add, (int64_t n, float factor, const float *x, float *y)) \
  R(double, sum, (int64_t n, const float *x)) \
  T(double, sum_squares, (int64_t n, const float *x)) \
  R(float, dot, (int64_t n, const float *a, const float *b)) \
  K(void, softmax, (int64_t rows, int64_t n, const float *x, float *y)) \
  T(void, softmax_backward, (int64_t rows, int64_t n, const float *y, const float *dy, float *dx)) \
  K(void, layer_norm, (int64_t rows, int64_t n, const float *x, const float *weight, const float *bias, float epsilon, \
                       float *y, float *mean, float *rstd)) \
  R(void, rms_norm, (int64_t rows, int64_t n, const float *x, const float *weight, float epsilon, float *y, \
      float *mean, float *rstd)) \
  T(void, layer_norm_backward, (bool rms, int64_t rows, int64_t n, const float *x, const float *weight, \
      const float *mean, const float *rstd, const float *dy, float *dx, bool add)) \
  T(void, layer_norm_weights, (int64_t rows, int64_t n, int64_t first, int64_t last, const float *x, \
                               const float *mean, const float *rstd, const float *dy, float *dweight, float *dbias)) \
  R(void, sum_rows, (int64_t rows, int64_t n, int64_t row_stride, int64_t first, int64_t last, float factor, \
                     const float *x, float *y)) \
  R(void, cross_entropy, (const lunai_cross_entropy *a)) \
  T(void, cross_entropy_backward, (const lunai_cross_entropy *a)) \
  K(void, short_convolution, (int64_t rows, int64_t n, int64_t width, const float *x, const float *history, \
                              const float *weight, const float *bias, float *y)) \
  T(void, short_convolution_backward, (int64_t rows, int64_t n, int64_t width, const float *weight, const float *dy, \
                                       float *dx)) \
  T(void, short_convolution_weights, (int64_t rows, int64_t n, int64_t width, int64_t first, int64_t last, \
                                      const float *x, const float *dy, float *dweight, float *dbias)) \
  R(void, dropout, (const lunai_dropout *dropout, int64_t first, int64_t n, const float *x, float *y, \
                    bool accumulate)) \
  T(void, sgd, (const lunai_update *update)) \
  T(void, adam, (const lunai_update *update)) \
  T(void, apollo_sums, (const lunai_update *update, double sums[3])) \
  T(void, apollo, (const lunai_update *update)) \
  R(size_t, attention_scratch, (const lunai_attention *a, int64_t threads, bool backward)) \
  R(void, attention, (const lunai_attention *a, const lunai_parallel *parallel, void *scratch)) \
  T(void, attention_backward, (const lunai_attention *a, const lunai_parallel *parallel, void *scratch)) \
  R(size_t, unpack_scratch, (const lunai_unpack *u, int64_t threads, bool backward)) \
  R(void, unpack, (const lunai_unpack *u, const lunai_parallel *parallel, void *scratch)) \
  T(void, unpack_backward, (const lunai_unpack *u, const lunai_parallel *parallel, void *scratch)) \
  R(size_t, causal_scratch, (const lunai_causal *c, int64_t threads, bool backward)) \
  R(void, causal, (const lunai_causal *c, const lunai_parallel *parallel, void *scratch)) \
  T(void, causal_backward, (const lunai_causal *c, const lunai_parallel *parallel, void *scratch)) \
  K(size_t, causal_luna_scratch, (const lunai_causal_luna *c, int64_t threads, bool backward)) \
  K(void, causal_luna, (const lunai_causal_luna *c, const lunai_parallel *parallel, void *scratch)) \
  T(void, causal_luna_backward, (const lunai_causal_luna *c, const lunai_parallel *parallel, void *scratch))
/* the inner loops that the drivers of gemm, cross-entropy, attention and causal products call */
#define LUNAI_LOOPS(K, R, T) \
  K(void, fill_panels, (int64_t n, int64_t k, const float *b, int64_t b_row, int64_t b_column, float *panels)) \
  K(void, panels, (int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, \
                   float *a_gathered, const float *panel, int64_t panel_step, int64_t b_row, const lunai_target *t)) \
  K(void, dot_rows, (int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, const float *b, int64_t b_column, \
                     const lunai_target *t)) \
  R(double, sum_exp, (int64_t n, const float *x, float shift)) \
  R(float, softmax_shift, (int64_t n, const float *x, float largest)) \
  R(void, dropout_mask, (const lunai_dropout *d, int64_t first, int64_t n, float *mask)) \
  R(void, tile_softmax, (bool across, int64_t lines, int64_t length, int64_t step, float *s, const float *mask, \
                         float *stats)) \
  T(void, tile_slopes, (bool across, int64_t lines, int64_t length, int64_t step, float *s, float *slopes, \
                        const float *mask, const float *lse, const float *delta, const float *add)) \
  R(void, tile_hide, (int64_t lines, int64_t length, int64_t step, int64_t from, int64_t to, float value, float *x)) \
  R(bool, finite_copy, (int64_t rows, int64_t n, const float *x, int64_t x_row, float *y)) \
  R(void, attention_merge, (int64_t width, int64_t dim, const float *stats, const float *part, float *state, \
                            float *out, int64_t out_row)) \
  R(void, attention_finish, (int64_t width, int64_t dim, float *state, float *out, int64_t out_row)) \
  R(void, unpack_softmax, (int64_t rows, int64_t groups, int64_t n, const float *bias, float *s, float *lse)) \
  T(void, unpack_slopes, (int64_t rows, int64_t groups, int64_t n, const float *bias, const float *mask, \
                          const float *lse, float *s, float *slopes)) \
  K(void, scan, (int64_t n, double joins, double leaves, float *state, double *carried)) \
  K(bool, all_finite, (int64_t rows, int64_t n, const float *x, int64_t x_row)) \
  K(void, copy_rows, (int64_t rows, int64_t n, const float *x, int64_t x_row, float *y, int64_t y_row)) \
  K(void, scale_rows, (int64_t rows, int64_t n, const float *factors, const float *x, int64_t x_row, float *y, \
                       int64_t y_row)) \
  K(void, step_state, (int64_t dim, int64_t n, double share, const float *y, const float *z, const float *x, \
                       double *mean, int64_t mean_row, double *result))

typedef struct lunai_kernels {
  int64_t mr, nr;                    /* rows of a gemm's register tile; columns of a panel of B */
#define LUNAI_FIELD(result, name, arguments) result (*name) arguments;
  LUNAI_KERNELS(LUNAI_FIELD, LUNAI_FIELD, LUNAI_FIELD)
  LUNAI_LOOPS(LUNAI_FIELD, LUNAI_FIELD, LUNAI_FIELD)
#undef LUNAI_FIELD
} lunai_kernels;

/* Philox4x32-10 (Salmon et al. 2011): four words out of counter and key */
LUNAI_FN void lunai_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  int round;
  for (round = 0; round < 10; round++) {
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

/* sin x and cos x to 1e-14 for |x| < 1e9: x less a multiple of pi/2, then Taylor's polynomials */
LUNAI_FN void lunai_sine(double x, double *sine, double *cosine) {
  const double turns = floor(x * 0.63661977236758134308 + 0.5),
      r = (x - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11, q = r * r;
  const double s = r + r * q * (-1.0 / 6 + q * (1.0 / 120 + q *
      (-1.0 / 5040 + q * (1.0 / 362880 + q * (-1.0 / 39916800 + q / 6227020800.0)))));
  const double c = 1 + q *
      (-0.5 + q * (1.0 / 24 + q * (-1.0 / 720 + q * (1.0 / 40320 + q *
                                                     (-1.0 / 3628800 + q * (1.0 / 479001600 - q / 87178291200.0))))));
  const int quarter = (int)((int64_t)turns & 3);
  *sine = quarter & 1 ? c : s;
  *cosine = quarter & 1 ? s : c;
  if (quarter & 2) *sine = -*sine;
  if (quarter == 1 || quarter == 2) *cosine = -*cosine;
}
/* Sinusoidal positions in tensor2tensor's form: position t has sin(t w_i) in the first half, cos(t w_i) in the second,
   w_i = 10000^(-i / (d/2 - 1)) rounded to float; an odd last is 0 */
LUNAI_FN double lunai_frequency(int64_t i, int64_t half) {
  return (double)(float)exp(-(double)i * (half > 1 ? 9.21034037197618273608 / (double)(half - 1) : 0));
}
#endif /* !LUNAI_PASS */

/* ---------------------------------------------------------------------------------------------------------------------
   >>kernels: each chapter has the reference, then the inner loops, then the driver
   Inner loops are compiled once for each instruction set: luna.h includes itself with LUNAI_PASS set to one of the
   LUNAI_ISA_ numbers, and LUNAI_K(name) is then lunai_name_<isa>. Drivers (blocking, splitting, tails) are compiled
   once and call the loops through the table that they are given.
   ------------------------------------------------------------------------------------------------------------------ */
#ifdef LUNAI_PASS
#undef LUNAI_PASS_LOOPS
#if LUNAI_PASS != LUNAI_ISA_SCALAR || !defined(LUNAI_SIMD) /* else only the vocabulary */
#define LUNAI_PASS_LOOPS
#define LUNAI_FIELD(result, name, arguments) LUNAI_FN result LUNAI_K(name) arguments;
LUNAI_KERNELS(LUNAI_FIELD, LUNAI_FIELD, LUNAI_FIELD)
LUNAI_LOOPS(LUNAI_FIELD, LUNAI_FIELD, LUNAI_FIELD)
#undef LUNAI_FIELD
#endif

/* .....................................................................................................................
   >>vector: VF floats at a time, and the functions every kernel needs of them
   a*b + c is fused only where the instruction set fuses: then vf_fma and vf_fnma are it, everywhere else two roundings.
   vf_max(a, b) is a > b ? a : b, so b when either is NaN. Guarded by tests/vectors.c.
   .................................................................................................................. */
#undef VF
#undef vf
#undef vm
#undef vf_zero
#undef vf_set
#undef vf_load
#undef vf_store
#undef vf_load_part
#undef vf_store_part
#undef vf_first
#undef vf_add
#undef vf_sub
#undef vf_mul
#undef vf_div
#undef vf_fma
#undef vf_fnma
#undef vf_max
#undef vf_min
#undef vf_sqrt
#undef vf_abs
#undef vf_lt
#undef vf_le
#undef vf_gt
#undef vf_select
#undef vf_sum
#undef vf_hmax
#undef vf_exp
#undef vf_log
#undef vf_erf
#undef vf_of
#undef vf_neg
#undef vf_exp2
#undef vf_log1p
#undef vf_tanh
#undef vf_half_gauss
#undef vf_normal_cdf
#define vf_of(number) vf_set((float)(number))
#define vf_neg(x) vf_sub(vf_zero(), x)
#define vf_exp2(x) LUNAI_K(exp2)(x)
#define vf_log1p(x) LUNAI_K(log1p)(x)
#define vf_tanh(x) LUNAI_K(tanh)(x)
#define vf_half_gauss(x) LUNAI_K(half_gauss)(x)
#define vf_normal_cdf(x) LUNAI_K(normal_cdf)(x, LUNAI_K(half_gauss)(x))
#define vf_gt(a, b) vf_lt(b, a)
#define vf_load_part(p, n) LUNAI_K(load_part)(p, n)
#define vf_store_part(p, v, n) LUNAI_K(store_part)(p, v, n)
#define vf_sum(v) LUNAI_K(sum_lanes)(v)
#define vf_hmax(v) LUNAI_K(max_lanes)(v)
#define vf_exp(x) LUNAI_K(exp)(x)
#define vf_log(x) LUNAI_K(log)(x)
#define vf_erf(x) LUNAI_K(erf)(x)

#undef LUNAI_PREFETCH
#if defined(__GNUC__) || defined(__clang__)
#define LUNAI_PREFETCH(p) __builtin_prefetch(p)
#else
#define LUNAI_PREFETCH(p) ((void)0)
#endif

/* nearest: to the nearest whole number, for |x| < 2^20 (anything else: a whole number, or not finite)
   scale2(x, n): x 2^n by adding n to the exponent; split(x, e): x = m 2^e with m in [sqrt(1/2), sqrt(2)), for normal x
   > 0 */
#if LUNAI_PASS == LUNAI_ISA_AVX512 /* maskz_ forms: gcc 12 warns of the undefined operand inside the unmasked ones */
#define VF 16
#define vf __m512
#define vm __mmask16
#define vf_zero() _mm512_setzero_ps()
#define vf_set(x) _mm512_set1_ps(x)
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, v) _mm512_storeu_ps(p, v)
#define vf_first(v) _mm512_cvtss_f32(v)
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_div(a, b) _mm512_div_ps(a, b)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_fnma(a, b, c) _mm512_fnmadd_ps(a, b, c)
#define vf_max(a, b) _mm512_maskz_max_ps(0xFFFF, a, b)
#define vf_min(a, b) _mm512_maskz_min_ps(0xFFFF, a, b)
#define vf_sqrt(a) _mm512_maskz_sqrt_ps(0xFFFF, a)
#define vf_abs(a) _mm512_abs_ps(a)
#define vf_lt(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define vf_le(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ)
#define vf_select(m, a, b) _mm512_mask_blend_ps(m, b, a)
LUNAI_INLINE vf vf_load_part(const float *p, int64_t n) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
LUNAI_INLINE void vf_store_part(float *p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v); }
LUNAI_INLINE __m128 LUNAI_K(halve)(vf v) {
  const __m256 a = _mm256_add_ps(_mm512_extractf32x8_ps(v, 0), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
LUNAI_INLINE float vf_hmax(vf v) {
  const __m256 a = _mm256_max_ps(_mm512_extractf32x8_ps(v, 0), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)),
      c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
LUNAI_INLINE vf LUNAI_K(nearest)(vf x) { return _mm512_maskz_cvtepi32_ps(0xFFFF, _mm512_maskz_cvtps_epi32(0xFFFF, x)); }
LUNAI_INLINE vf LUNAI_K(scale2)(vf x, vf n) { return _mm512_maskz_scalef_ps(0xFFFF, x, n); }
LUNAI_INLINE vf LUNAI_K(split)(vf x, vf *e) {
  const __m512i bits = _mm512_castps_si512(x), from = _mm512_sub_epi32(bits, _mm512_set1_epi32(0x3F3504F3));
  const __m512i n = _mm512_maskz_srai_epi32(0xFFFF, from, 23);
  *e = _mm512_maskz_cvtepi32_ps(0xFFFF, n);
  return _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_maskz_slli_epi32(0xFFFF, n, 23)));
}

#elif LUNAI_PASS == LUNAI_ISA_AVX2
#define VF 8
#define vf __m256
#define vm __m256
#define vf_zero() _mm256_setzero_ps()
#define vf_set(x) _mm256_set1_ps(x)
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, v) _mm256_storeu_ps(p, v)
#define vf_first(v) _mm256_cvtss_f32(v)
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_div(a, b) _mm256_div_ps(a, b)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_fnma(a, b, c) _mm256_fnmadd_ps(a, b, c)
#define vf_max(a, b) _mm256_max_ps(a, b)
#define vf_min(a, b) _mm256_min_ps(a, b)
#define vf_sqrt(a) _mm256_sqrt_ps(a)
#define vf_abs(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define vf_lt(a, b) _mm256_cmp_ps(a, b, _CMP_LT_OQ)
#define vf_le(a, b) _mm256_cmp_ps(a, b, _CMP_LE_OQ)
#define vf_select(m, a, b) _mm256_blendv_ps(b, a, m)
LUNAI_INLINE __m256i LUNAI_K(first_lanes)(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LUNAI_INLINE vf vf_load_part(const float *p, int64_t n) { return _mm256_maskload_ps(p, LUNAI_K(first_lanes)(n)); }
LUNAI_INLINE void vf_store_part(float *p, vf v, int64_t n) { _mm256_maskstore_ps(p, LUNAI_K(first_lanes)(n), v); }
LUNAI_INLINE __m128 LUNAI_K(halve)(vf v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
LUNAI_INLINE float vf_hmax(vf v) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)),
      c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
LUNAI_INLINE vf LUNAI_K(nearest)(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LUNAI_INLINE vf LUNAI_K(scale2)(vf x, vf n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
LUNAI_INLINE vf LUNAI_K(split)(vf x, vf *e) {
  const __m256i bits = _mm256_castps_si256(x), n = _mm256_srai_epi32(_mm256_sub_epi32(bits,
      _mm256_set1_epi32(0x3F3504F3)), 23);
  *e = _mm256_cvtepi32_ps(n);
  return _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(n, 23)));
}

#elif LUNAI_PASS == LUNAI_ISA_SSE2
#define VF 4
#define vf __m128
#define vm __m128
#define vf_zero() _mm_setzero_ps()
#define vf_set(x) _mm_set1_ps(x)
#define vf_load(p) _mm_loadu_ps(p)
#define vf_store(p, v) _mm_storeu_ps(p, v)
#define vf_first(v) _mm_cvtss_f32(v)
#define vf_add(a, b) _mm_add_ps(a, b)
#define vf_sub(a, b) _mm_sub_ps(a, b)
#define vf_mul(a, b) _mm_mul_ps(a, b)
#define vf_div(a, b) _mm_div_ps(a, b)
#define vf_fma(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
#define vf_fnma(a, b, c) _mm_sub_ps(c, _mm_mul_ps(a, b))
#define vf_max(a, b) _mm_max_ps(a, b)
#define vf_min(a, b) _mm_min_ps(a, b)
#define vf_sqrt(a) _mm_sqrt_ps(a)
#define vf_abs(a) _mm_andnot_ps(_mm_set1_ps(-0.0f), a)
#define vf_lt(a, b) _mm_cmplt_ps(a, b)
#define vf_le(a, b) _mm_cmple_ps(a, b)
#define vf_select(m, a, b) LUNAI_K(select)(m, a, b)
LUNAI_INLINE vf vf_select(vm m, vf a, vf b) { return _mm_or_ps(_mm_and_ps(m, a), _mm_andnot_ps(m, b)); }
LUNAI_CALL vf vf_load_part(const float *p, int64_t n) {
  if (n >= 3)
    return _mm_movelh_ps(_mm_setr_ps(p[0], p[1], 0, 0), n > 3 ? _mm_setr_ps(p[2], p[3], 0, 0) : _mm_load_ss(p + 2));
  return n == 2 ? _mm_setr_ps(p[0], p[1], 0, 0) : n == 1 ? _mm_load_ss(p) : _mm_setzero_ps();
}
LUNAI_CALL void vf_store_part(float *p, vf v, int64_t n) {
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
LUNAI_INLINE __m128 LUNAI_K(halve)(vf v) { return v; }
LUNAI_INLINE float vf_hmax(vf v) {
  const __m128 c = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
LUNAI_INLINE vf LUNAI_K(nearest)(vf x) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(x)); }
LUNAI_INLINE vf LUNAI_K(scale2)(vf x, vf n) {
  return _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(x), _mm_slli_epi32(_mm_cvtps_epi32(n), 23)));
}
LUNAI_INLINE vf LUNAI_K(split)(vf x, vf *e) {
  const __m128i bits = _mm_castps_si128(x), n = _mm_srai_epi32(_mm_sub_epi32(bits, _mm_set1_epi32(0x3F3504F3)), 23);
  *e = _mm_cvtepi32_ps(n);
  return _mm_castsi128_ps(_mm_sub_epi32(bits, _mm_slli_epi32(n, 23)));
}

#elif LUNAI_PASS == LUNAI_ISA_NEON
#define VF 4
#define vf float32x4_t
#define vm uint32x4_t
#define vf_zero() vdupq_n_f32(0.0f)
#define vf_set(x) vdupq_n_f32(x)
#define vf_load(p) vld1q_f32(p)
#define vf_store(p, v) vst1q_f32(p, v)
#define vf_first(v) vgetq_lane_f32(v, 0)
#define vf_add(a, b) vaddq_f32(a, b)
#define vf_sub(a, b) vsubq_f32(a, b)
#define vf_mul(a, b) vmulq_f32(a, b)
#define vf_div(a, b) vdivq_f32(a, b)
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_fnma(a, b, c) vfmsq_f32(c, a, b)
#define vf_max(a, b) LUNAI_K(max)(a, b)
#define vf_min(a, b) LUNAI_K(min)(a, b)
#define vf_sqrt(a) vsqrtq_f32(a)
#define vf_abs(a) vabsq_f32(a)
#define vf_lt(a, b) vcltq_f32(a, b)
#define vf_le(a, b) vcleq_f32(a, b)
#define vf_select(m, a, b) vbslq_f32(m, a, b)
LUNAI_INLINE vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
LUNAI_INLINE vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
LUNAI_INLINE float vf_sum(vf v) {
  const float32x2_t a = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vget_lane_f32(a, 0) + vget_lane_f32(a, 1);
}
LUNAI_INLINE float vf_hmax(vf v) { return vmaxvq_f32(v); }
LUNAI_INLINE vf LUNAI_K(nearest)(vf x) { return vrndnq_f32(x); }
LUNAI_INLINE vf LUNAI_K(scale2)(vf x, vf n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
}
LUNAI_INLINE vf LUNAI_K(split)(vf x, vf *e) {
  const int32x4_t bits = vreinterpretq_s32_f32(x), n = vshrq_n_s32(vsubq_s32(bits, vdupq_n_s32(0x3F3504F3)), 23);
  *e = vcvtq_f32_s32(n);
  return vreinterpretq_f32_s32(vsubq_s32(bits, vshlq_n_s32(n, 23)));
}

#elif LUNAI_PASS == LUNAI_ISA_WASM
#define VF 4
#define vf v128_t
#define vm v128_t
#define vf_zero() wasm_f32x4_splat(0.0f)
#define vf_set(x) wasm_f32x4_splat(x)
#define vf_load(p) wasm_v128_load(p)
#define vf_store(p, v) wasm_v128_store(p, v)
#define vf_first(v) wasm_f32x4_extract_lane(v, 0)
#define vf_add(a, b) wasm_f32x4_add(a, b)
#define vf_sub(a, b) wasm_f32x4_sub(a, b)
#define vf_mul(a, b) wasm_f32x4_mul(a, b)
#define vf_div(a, b) wasm_f32x4_div(a, b)
#define vf_fma(a, b, c) wasm_f32x4_add(wasm_f32x4_mul(a, b), c)
#define vf_fnma(a, b, c) wasm_f32x4_sub(c, wasm_f32x4_mul(a, b))
#define vf_max(a, b) wasm_f32x4_pmax(b, a)
#define vf_min(a, b) wasm_f32x4_pmin(b, a)
#define vf_sqrt(a) wasm_f32x4_sqrt(a)
#define vf_abs(a) wasm_f32x4_abs(a)
#define vf_lt(a, b) wasm_f32x4_lt(a, b)
#define vf_le(a, b) wasm_f32x4_le(a, b)
#define vf_select(m, a, b) wasm_v128_bitselect(a, b, m)
LUNAI_INLINE float vf_sum(vf v) {
  const vf a = wasm_f32x4_add(v, wasm_i32x4_shuffle(v, v, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1);
}
LUNAI_INLINE float vf_hmax(vf v) {
  const vf a = vf_max(v, wasm_i32x4_shuffle(v, v, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(vf_max(a, wasm_i32x4_shuffle(a, a, 1, 0, 3, 2)), 0);
}
LUNAI_INLINE vf LUNAI_K(nearest)(vf x) { return wasm_f32x4_nearest(x); }
LUNAI_INLINE vf LUNAI_K(scale2)(vf x, vf n) {
  return wasm_i32x4_add(x, wasm_i32x4_shl(wasm_i32x4_trunc_sat_f32x4(n), 23));
}
LUNAI_INLINE vf LUNAI_K(split)(vf x, vf *e) {
  const v128_t n = wasm_i32x4_shr(wasm_i32x4_sub(x, wasm_i32x4_splat(0x3F3504F3)), 23);
  *e = wasm_f32x4_convert_i32x4(n);
  return wasm_i32x4_sub(x, wasm_i32x4_shl(n, 23));
}

#else
#define VF 1
#define vf float
#define vm bool
#define vf_zero() ((float)0)
#define vf_set(x) (x)
#define vf_load(p) (*(p))
#define vf_store(p, v) ((void)(*(p) = (v)))
#define vf_first(v) (v)
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_div(a, b) ((a) / (b))
#define vf_fma(a, b, c) ((a) * (b) + (c))
#define vf_fnma(a, b, c) ((c) - (a) * (b))
#define vf_max(a, b) LUNAI_K(max)(a, b)
#define vf_min(a, b) LUNAI_K(min)(a, b)
#ifdef LUNAI_DOUBLE
#define vf_sqrt(a) sqrt(a)
#define vf_abs(a) fabs(a)
#else
#define vf_sqrt(a) sqrtf(a)
#define vf_abs(a) fabsf(a)
#endif
#define vf_lt(a, b) ((a) < (b))
#define vf_le(a, b) ((a) <= (b))
#define vf_select(m, a, b) ((m) ? (a) : (b))
LUNAI_INLINE vf vf_max(vf a, vf b) { return a > b ? a : b; }
LUNAI_INLINE vf vf_min(vf a, vf b) { return a < b ? a : b; }
LUNAI_INLINE vf vf_load_part(const float *p, int64_t n) { return n > 0 ? *p : 0; }
LUNAI_INLINE void vf_store_part(float *p, vf v, int64_t n) { if (n > 0) *p = v; }
LUNAI_INLINE float vf_sum(vf v) { return v; }
LUNAI_INLINE float vf_hmax(vf v) { return v; }
#ifndef LUNAI_DOUBLE
LUNAI_INLINE vf LUNAI_K(nearest)(vf x) {
  return x > -1e6f && x < 1e6f ? (float)(int32_t)(x + (x < 0 ? -0.5f : 0.5f)) : 0.0f;
}
LUNAI_INLINE vf LUNAI_K(scale2)(vf x, vf n) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits += (uint32_t)(int32_t)n << 23;
  memcpy(&x, &bits, sizeof bits);
  return x;
}
LUNAI_INLINE vf LUNAI_K(split)(vf x, vf *e) {
  uint32_t bits;
  int32_t n;
  memcpy(&bits, &x, sizeof bits);
  n = (int32_t)((bits - 0x3F3504F3u + (127u << 23)) >> 23) - 127;
  *e = (float)n;
  bits -= (uint32_t)n << 23;
  memcpy(&x, &bits, sizeof bits);
  return x;
}
#endif
#endif

/* the sum of a vector's lanes; out[i] = alpha times that of the i-th of four, with the same bits */
#if LUNAI_PASS == LUNAI_ISA_AVX512 || LUNAI_PASS == LUNAI_ISA_AVX2 || LUNAI_PASS == LUNAI_ISA_SSE2
LUNAI_INLINE float vf_sum(vf v) {
  const __m128 b = LUNAI_K(halve)(v), c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
LUNAI_INLINE void LUNAI_K(sum4)(const vf *v, float alpha, float *out) {
  const __m128 a = LUNAI_K(halve)(v[0]), b = LUNAI_K(halve)(v[1]), c = LUNAI_K(halve)(v[2]), d = LUNAI_K(halve)(v[3]);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b)),
      cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(out, _mm_mul_ps(_mm_set1_ps(alpha), _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab))));
}
#else
LUNAI_INLINE void LUNAI_K(sum4)(const vf *v, float alpha, float *out) {
  int i;
  for (i = 0; i < 4; i++) out[i] = alpha * vf_sum(v[i]);
}
#endif

#if LUNAI_PASS == LUNAI_ISA_NEON || LUNAI_PASS == LUNAI_ISA_WASM
LUNAI_CALL vf vf_load_part(const float *p, int64_t n) {
  float lanes[VF] = {0, 0, 0, 0};
  int64_t i;
  for (i = 0; i < n; i++) lanes[i] = p[i];
  return vf_load(lanes);
}
LUNAI_CALL void vf_store_part(float *p, vf v, int64_t n) {
  float lanes[VF];
  int64_t i;
  vf_store(lanes, v);
  for (i = 0; i < n; i++) p[i] = lanes[i];
}
#endif

static const float LUNAI_K(lanes)[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* loads a vector of which `left` > 0 floats exist; the rest is 0, or `fill` */
LUNAI_INLINE vf LUNAI_K(get)(const float *p, int64_t left) { return left >= VF ? vf_load(p) : vf_load_part(p, left); }
LUNAI_INLINE vf LUNAI_K(get_filled)(const float *p, int64_t left, vf fill) {
  if (left >= VF) return vf_load(p);
  return vf_select(vf_lt(vf_load(LUNAI_K(lanes)), vf_set((float)left)), vf_load_part(p, left), fill);
}
LUNAI_INLINE void LUNAI_K(put)(float *p, vf v, int64_t left) {
  if (left >= VF) vf_store(p, v);
  else vf_store_part(p, v, left);
}

/* to[p * step + i] = row i [p] for i, p < 4: a transposition in registers */
LUNAI_INLINE void LUNAI_K(turn4)(const float *row0, const float *row1, const float *row2, const float *row3, float *to,
                                 int64_t step) {
#if LUNAI_PASS == LUNAI_ISA_SCALAR
  int i;
  for (i = 0; i < 4; i++, to += step) {
    to[0] = row0[i];
    to[1] = row1[i];
    to[2] = row2[i];
    to[3] = row3[i];
  }
#elif LUNAI_PASS == LUNAI_ISA_NEON
  const vf a = vld1q_f32(row0), b = vld1q_f32(row1), c = vld1q_f32(row2), d = vld1q_f32(row3);
  const vf ac = vzip1q_f32(a, c), bd = vzip1q_f32(b, d), ac2 = vzip2q_f32(a, c), bd2 = vzip2q_f32(b, d);
  vst1q_f32(to, vzip1q_f32(ac, bd));
  vst1q_f32(to + step, vzip2q_f32(ac, bd));
  vst1q_f32(to + 2 * step, vzip1q_f32(ac2, bd2));
  vst1q_f32(to + 3 * step, vzip2q_f32(ac2, bd2));
#elif LUNAI_PASS == LUNAI_ISA_WASM
  const vf a = wasm_v128_load(row0), b = wasm_v128_load(row1), c = wasm_v128_load(row2), d = wasm_v128_load(row3);
  const vf ac = wasm_i32x4_shuffle(a, c, 0, 4, 1, 5), bd = wasm_i32x4_shuffle(b, d, 0, 4, 1, 5);
  const vf ac2 = wasm_i32x4_shuffle(a, c, 2, 6, 3, 7), bd2 = wasm_i32x4_shuffle(b, d, 2, 6, 3, 7);
  wasm_v128_store(to, wasm_i32x4_shuffle(ac, bd, 0, 4, 1, 5));
  wasm_v128_store(to + step, wasm_i32x4_shuffle(ac, bd, 2, 6, 3, 7));
  wasm_v128_store(to + 2 * step, wasm_i32x4_shuffle(ac2, bd2, 0, 4, 1, 5));
  wasm_v128_store(to + 3 * step, wasm_i32x4_shuffle(ac2, bd2, 2, 6, 3, 7));
#else
  const __m128 a = _mm_loadu_ps(row0), b = _mm_loadu_ps(row1), c = _mm_loadu_ps(row2), d = _mm_loadu_ps(row3);
  const __m128 ac = _mm_unpacklo_ps(a, c), bd = _mm_unpacklo_ps(b, d), ac2 = _mm_unpackhi_ps(a, c),
      bd2 = _mm_unpackhi_ps(b, d);
  _mm_storeu_ps(to, _mm_unpacklo_ps(ac, bd));
  _mm_storeu_ps(to + step, _mm_unpackhi_ps(ac, bd));
  _mm_storeu_ps(to + 2 * step, _mm_unpacklo_ps(ac2, bd2));
  _mm_storeu_ps(to + 3 * step, _mm_unpackhi_ps(ac2, bd2));
#endif
}

#ifdef LUNAI_DOUBLE
LUNAI_INLINE vf vf_exp(vf x) { return exp(x); }
LUNAI_INLINE vf vf_log(vf x) { return log(x); }
LUNAI_INLINE vf vf_erf(vf x) { return erf(x); }
LUNAI_INLINE vf LUNAI_K(exp2)(vf x) { return exp2(x); }
LUNAI_INLINE vf LUNAI_K(log1p)(vf x) { return log1p(x); }
LUNAI_INLINE vf LUNAI_K(tanh)(vf x) { return tanh(x); }
LUNAI_INLINE vf LUNAI_K(normal_cdf)(vf x, vf e) { (void)e; return 0.5 * erfc(-0.70710678118654752440 * x); }
#else
/* e^r 2^n for |r| <= ln(2)/2: 1 + r + r^2 P(r) */
LUNAI_ONCE vf LUNAI_K(exp_of)(vf r, vf n) {
  vf p = vf_fma(vf_set(1.381422187e-03f), r, vf_set(8.368898669e-03f));
  p = vf_fma(p, r, vf_set(4.166840572e-02f));
  p = vf_fma(p, r, vf_set(1.666651913e-01f));
  p = vf_fma(p, r, vf_set(4.999999335e-01f));
  p = vf_fma(p, vf_mul(r, r), r);
  return LUNAI_K(scale2)(vf_add(p, vf_set(1.0f)), n);
}
LUNAI_ONCE vf vf_exp(vf x) {
  const vf n = LUNAI_K(nearest)(vf_mul(x, vf_set(1.44269504f)));
  const vf r = vf_fnma(n, vf_set(-2.12194440e-4f), vf_fnma(n, vf_set(0.693359375f), x));
  const vf y = vf_select(vf_lt(x, vf_set(-87.3365402f)), vf_zero(), LUNAI_K(exp_of)(r, n));
  return vf_select(vf_le(x, vf_set(88.7228317f)), y, vf_mul(x, vf_set((float)INFINITY)));
}
LUNAI_INLINE vf LUNAI_K(exp2)(vf x) {
  const vf n = LUNAI_K(nearest)(x);
  const vf y = vf_select(vf_lt(x, vf_set(-126.0f)), vf_zero(),
                         LUNAI_K(exp_of)(vf_mul(vf_sub(x, n), vf_set(0.693147181f)), n));
  return vf_select(vf_lt(x, vf_set(128.0f)), y, vf_mul(x, vf_set((float)INFINITY)));
}
/* ln x for normal x: m 2^e, f = m - 1, ln(1 + f) = f - f^2/2 + f^3 P(f) */
LUNAI_ONCE vf LUNAI_K(log_of)(vf x) {
  vf e, p;
  const vf f = vf_sub(LUNAI_K(split)(x, &e), vf_set(1.0f)), square = vf_mul(f, f);
  p = vf_fma(vf_set(-7.634496512e-02f), f, vf_set(1.276157704e-01f));
  p = vf_fma(p, f, vf_set(-1.316018240e-01f));
  p = vf_fma(p, f, vf_set(1.420175800e-01f));
  p = vf_fma(p, f, vf_set(-1.662335734e-01f));
  p = vf_fma(p, f, vf_set(2.000122688e-01f));
  p = vf_fma(p, f, vf_set(-2.500082103e-01f));
  p = vf_fma(p, f, vf_set(3.333333171e-01f));
  p = vf_fma(e, vf_set(-2.12194440e-4f), vf_mul(vf_mul(p, f), square));
  p = vf_fnma(vf_set(0.5f), square, p);
  return vf_fma(e, vf_set(0.693359375f), vf_add(p, f));
}
/* x > 0; 0 and below give -Inf */
LUNAI_INLINE vf vf_log(vf x) {
  const vm tiny = vf_lt(x, vf_set(1.17549435e-38f));
  const vf y = LUNAI_K(log_of)(vf_select(tiny, vf_mul(x, vf_set(8388608.0f)), x));
  const vf z = vf_sub(y, vf_select(tiny, vf_set(15.9423851f), vf_zero()));
  return vf_select(vf_le(x, vf_zero()), vf_set(-(float)INFINITY), vf_select(vf_lt(x, vf_set((float)INFINITY)), z, x));
}
/* ln(1 + x), 0 <= x <= 1, corrected to first order for the rounding of 1 + x */
LUNAI_INLINE vf LUNAI_K(log1p)(vf x) {
  const vf one = vf_set(1.0f), u = vf_add(one, x);
  return vf_add(LUNAI_K(log_of)(u), vf_div(vf_sub(x, vf_sub(u, one)), u));
}
/* erfc(a) for a >= 0 with e = exp(-a^2): e times a polynomial in t = 1/(1 + 0.4 a) */
LUNAI_INLINE vf LUNAI_K(erfc_of)(vf a, vf e) {
  const vf t = vf_div(vf_set(1.0f), vf_fma(a, vf_set(0.4f), vf_set(1.0f)));
  vf p = vf_fma(vf_set(4.125306336e-02f), t, vf_set(-1.403193500e-01f));
  p = vf_fma(p, t, vf_set(8.398751562e-02f));
  p = vf_fma(p, t, vf_set(8.796408696e-02f));
  p = vf_fma(p, t, vf_set(7.975665838e-02f));
  p = vf_fma(p, t, vf_set(1.933931405e-01f));
  p = vf_fma(p, t, vf_set(2.018876065e-01f));
  p = vf_fma(p, t, vf_set(2.264431092e-01f));
  p = vf_fma(p, t, vf_set(2.256342313e-01f));
  return vf_mul(vf_mul(p, t), e);
}
LUNAI_INLINE vf vf_erf(vf x) {
  const vf a = vf_abs(x), square = vf_mul(x, x);
  const vf c = LUNAI_K(erfc_of)(a, vf_exp(vf_sub(vf_zero(), square))), large = vf_sub(vf_set(1.0f), c);
  vf p = vf_fma(vf_set(7.853882574e-05f), square, vf_set(-8.010200583e-04f));
  p = vf_fma(p, square, vf_set(5.188328565e-03f));
  p = vf_fma(p, square, vf_set(-2.685381247e-02f));
  p = vf_fma(p, square, vf_set(1.128358516e-01f));
  p = vf_fma(p, square, vf_set(-3.761262583e-01f));
  p = vf_mul(vf_fma(p, square, vf_set(1.128379166e+00f)), x);
  return vf_select(vf_lt(a, vf_set(1.0f)), p, vf_select(vf_lt(x, vf_zero()), vf_sub(vf_zero(), large), large));
}
/* x + x^3 P(x^2) to 0.625 (Cephes' tanhf), then 1 - 2 / (e^(2 x) + 1) */
LUNAI_INLINE vf LUNAI_K(tanh)(vf x) {
  const vf a = vf_abs(x), square = vf_mul(x, x), one = vf_set(1.0f);
  const vf large = vf_sub(one, vf_div(vf_set(2.0f), vf_add(vf_exp(vf_add(a, a)), one)));
  vf p = vf_fma(vf_set(-5.70498872745e-3f), square, vf_set(2.06390887954e-2f));
  p = vf_fma(p, square, vf_set(-5.37397155531e-2f));
  p = vf_fma(p, square, vf_set(1.33314422036e-1f));
  p = vf_fma(p, square, vf_set(-3.33332819422e-1f));
  p = vf_mul(vf_fma(p, square, one), x);
  return vf_select(vf_lt(a, vf_set(0.625f)), p, vf_select(vf_lt(x, vf_zero()), vf_sub(vf_zero(), large), large));
}
/* P(X <= x) of a standard normal X with e = exp(-x^2/2): the smaller tail is computed, so that neither loses digits */
LUNAI_INLINE vf LUNAI_K(normal_cdf)(vf x, vf e) {
  const vf tail = vf_mul(vf_set(0.5f), LUNAI_K(erfc_of)(vf_mul(vf_abs(x), vf_set(0.707106781f)), e));
  return vf_select(vf_lt(x, vf_zero()), tail, vf_sub(vf_set(1.0f), tail));
}
#endif
LUNAI_FN float LUNAI_K(exp1)(float x) { return vf_first(vf_exp(vf_set(x))); }
LUNAI_FN float LUNAI_K(log1)(float x) { return vf_first(vf_log(vf_set(x))); }

/* e^(-x^2 / 2) */
LUNAI_INLINE vf LUNAI_K(half_gauss)(vf x) { return vf_exp(vf_mul(vf_mul(x, vf_of(-0.5)), x)); }

#undef LUNAI_VALUE
#undef LUNAI_SLOPE
#define LUNAI_VALUE(NAME, name, value, slope) case LUNA_ACTIVATION_##NAME: return value;
#define LUNAI_SLOPE(NAME, name, value, slope) case LUNA_ACTIVATION_##NAME: { const vf y = value; (void)y; \
    return slope; }
/* of a layer: what a product's epilogue applies */
LUNAI_ONCE vf LUNAI_K(activation1)(int kind, vf x) {
  switch (kind) { LUNA_ACTIVATIONS(LUNAI_VALUE) default: return x; }
}
#ifdef LUNA_ONLY_STREAM              /* small: of these alone */
LUNAI_INLINE vf LUNAI_K(map1)(int kind, vf x) { return LUNAI_K(activation1)(kind, x); }
#else
LUNAI_INLINE vf LUNAI_K(map1)(int kind, vf x) { switch (kind) { LUNA_MAPS(LUNAI_VALUE) default: return x; } }
#endif
LUNAI_INLINE vf LUNAI_K(map1_slope)(int kind, vf x) {
  switch (kind) { LUNA_MAPS(LUNAI_SLOPE) default: return vf_of(1); }
}
/* LUNA_ELEMENTWISE: the value, and the gradient of an input where g is the result's */
#undef LUNAI_EACH
#define LUNAI_EACH(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) case LUNA_OP_##NAME: return value;
LUNAI_INLINE vf LUNAI_K(elementwise1)(int kind, vf a, vf b, vf c) {
  switch (kind) { LUNA_ELEMENTWISE(LUNAI_EACH) default: return c; }
}
#undef LUNAI_EACH
#define LUNAI_EACH(NAME, tier, reads, cheap, function, inputs, value, da, db, dc) \
  case LUNA_OP_##NAME: \
    if (input == 0) return da; \
    if (input == 1) return db; \
    return dc;
LUNAI_INLINE vf LUNAI_K(elementwise1_slope)(int kind, int input, vf a, vf b, vf c, vf g) {
  (void)c;
  switch (kind) { LUNA_ELEMENTWISE(LUNAI_EACH) default: return g; }
}
LUNAI_FN float LUNAI_K(activation)(int kind, float x) { return vf_first(LUNAI_K(map1)(kind, vf_set(x))); }
LUNAI_FN float LUNAI_K(slope)(int kind, float x) { return vf_first(LUNAI_K(map1_slope)(kind, vf_set(x))); }
LUNAI_FN float LUNAI_K(each)(int kind, float a, float b, float c) {
  return vf_first(LUNAI_K(elementwise1)(kind, vf_set(a), vf_set(b), vf_set(c)));
}
LUNAI_FN float LUNAI_K(each_slope)(int kind, int input, float a, float b, float c, float g) {
  return vf_first(LUNAI_K(elementwise1_slope)(kind, input, vf_set(a), vf_set(b), vf_set(c), vf_set(g)));
}
#endif /* LUNAI_PASS */

/* .....................................................................................................................
   >>gemm: C = act(alpha A B + bias) (+ C), or alpha A B + bias + residual; A [m, k], B [k, n], any strides
   B is copied into panels of NR columns, [panel][k][NR], zero padded; a tile of up to MR rows of C by one panel lives
   in registers while k runs in order over a block of KC; blocks are added to C in order. Nothing else touches an
   element, so its bits depend on its row of A, its column of B and k alone. Only `dots`, for decoding, sums in another
   order. Guarded by tests/gemm.c.
   .................................................................................................................. */
#ifndef LUNAI_PASS
/* The reference: from the definition, sums in double */
LUNAI_FN double lunai_inner(int64_t n, const float *a, int64_t a_step, const float *b, int64_t b_step) {
  double sum = 0;
  int64_t i;
  for (i = 0; i < n; i++) sum += (double)a[i * a_step] * (double)b[i * b_step];
  return sum;
}
LUNAI_FN void lunai_gemm_reference(const lunai_gemm *g, const lunai_parallel *parallel, void *scratch) {
  int64_t item, i, j;
  (void)parallel, (void)scratch;
  for (item = 0; item < g->batch[0] * g->batch[1]; item++) {
    const int64_t x = item / g->batch[1], y = item % g->batch[1], first = x * g->c_batch[0] + y * g->c_batch[1];
    const float *a = g->a + x * g->a_batch[0] + y * g->a_batch[1], *b = g->b + x * g->b_batch[0] + y * g->b_batch[1];
    for (i = 0; i < g->m; i++)
      for (j = 0; j < g->n; j++) {
        const int64_t at = first + i * g->c_row + j;
        double sum = (double)g->alpha * lunai_inner(g->k, a + i * g->a_row, g->a_column, b + j * g->b_column, g->b_row);
        sum += (g->bias ? (double)g->bias[j] : 0) + (g->residual ? (double)g->residual[at] : 0);
        if (g->pre) g->pre[at] = (float)sum;
        g->c[at] = lunai_activation_scalar(g->activation, (float)sum) + (g->accumulate ? g->c[at] : 0);
      }
  }
}
#endif

#ifdef LUNAI_PASS_LOOPS
#undef LUNAI_MR
#undef LUNAI_NV
#undef LUNAI_NR
#if LUNAI_PASS == LUNAI_ISA_AVX512
#define LUNAI_MR 14
#define LUNAI_NV 2
#elif LUNAI_PASS == LUNAI_ISA_AVX2
#define LUNAI_MR 6
#define LUNAI_NV 2
#elif LUNAI_PASS == LUNAI_ISA_NEON
#define LUNAI_MR 8
#define LUNAI_NV 3
/* small: single rows, which are neither gathered nor prefetched */
#elif defined(LUNA_ONLY_STREAM) && LUNAI_PASS == LUNAI_ISA_SCALAR
#define LUNAI_MR 1
#define LUNAI_NV 4
#elif LUNAI_PASS == LUNAI_ISA_SCALAR
#define LUNAI_MR 4
#define LUNAI_NV 4
#else
#define LUNAI_MR 4
#define LUNAI_NV 2
#endif
#define LUNAI_NR (LUNAI_NV * VF)

/* one panel, of which `columns` exist; B has `ahead` columns in memory from the panel's first on, for prefetching */
LUNAI_FN void LUNAI_K(fill_panel)(int64_t columns, int64_t ahead, int64_t k, const float *b, int64_t b_row,
                                  int64_t b_column, float *to) {
  int64_t j = 0, p;
  if (b_column == 1 && columns == LUNAI_NR) {
    for (p = 0; p < k; p++) memcpy(to + p * LUNAI_NR, b + p * b_row, LUNAI_NR * sizeof(float));
    return;
  }
  if (LUNAI_MR > 1 && b_row == 1)
    for (; j + 4 <= columns; j += 4) {
      const float *x = b + j * b_column, *next = x + lunai_min(4, ahead - 4 - j) * b_column;
      for (p = 0; p + 4 <= k; p += 4) {
        LUNAI_PREFETCH(next + p + (p / 4 & 3) * b_column); /* one cache line of each of four columns every sixteen k */
        LUNAI_K(turn4)(x + p, x + p + b_column, x + p + 2 * b_column, x + p + 3 * b_column, to + p * LUNAI_NR + j,
                       LUNAI_NR);
      }
      for (; p < k; p++) {
        int64_t i;
        for (i = 0; i < 4; i++) to[p * LUNAI_NR + j + i] = x[p + i * b_column];
      }
    }
  for (p = 0; p < k; p++) {
    int64_t i;
    for (i = j; i < LUNAI_NR; i++) to[p * LUNAI_NR + i] = i < columns ? b[p * b_row + i * b_column] : 0;
  }
}
LUNAI_FN void LUNAI_K(fill_panels)(int64_t n, int64_t k, const float *b, int64_t b_row, int64_t b_column,
                                   float *panels) {
  int64_t j = 0, p, i;
  if (LUNAI_MR > 1 && b_column == 1) /* four panels at a time: longer contiguous reads */
    for (; j + 4 * LUNAI_NR <= n; j += 4 * LUNAI_NR)
      for (p = 0; p < k; p++)
        for (i = 0; i < 4; i++)
          memcpy(panels + (j + i * LUNAI_NR) * k + p * LUNAI_NR, b + p * b_row + j + i * LUNAI_NR,
                 LUNAI_NR * sizeof(float));
  for (; j < n; j += LUNAI_NR)
    LUNAI_K(fill_panel)(lunai_min(n - j, LUNAI_NR), n - j, k, b + j * b_column, b_row, b_column, panels + j * k);
}

/* copies `rows` <= MR rows of A: LUNAI_KA floats apart or, where A is column-major, as [k][MR] */
LUNAI_FN void LUNAI_K(gather_rows)(int64_t rows, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                                   float *to) {
  int64_t i, p;
  if (a_column == 1)
    for (i = 0; i < rows; i++) memcpy(to + i * LUNAI_KA, a + i * a_row, (size_t)k * sizeof(float));
  else
    for (p = 0; p < k; p++)
      for (i = 0; i < rows; i++) to[p * LUNAI_MR + i] = a[i * a_row + p * a_column];
}
/* Copies whole tiles of a column-major A, reading each cache line once. */
LUNAI_FN void LUNAI_K(gather_columns)(int64_t tiles, int64_t k, const float *a, int64_t a_column, float *to) {
  int64_t t, p;
  for (p = 0; p < k; p++, a += a_column)
    for (t = 0; t < tiles; t++)
      memcpy(to + t * LUNAI_MR * LUNAI_KA + p * LUNAI_MR, a + t * LUNAI_MR, LUNAI_MR * sizeof(float));
}

/* The tile, unrolled by hand: gcc keeps an array in registers only when every index is a constant, as `rows` is in
   every case below. Rows of A are addressed from every third one: an x86 address holds a base plus one or two
   strides at no cost. A narrow tile is half a panel wide and has rows i and i + MR where a wide one has row i. */
#undef LUNAI_ROWS
#undef LUNAI_TILE_ZERO
#undef LUNAI_TILE_STEP
#undef LUNAI_TILE_STORE
#undef LUNAI_NARROW_STEP
#undef LUNAI_NARROW_STORE
#define LUNAI_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define LUNAI_TILE_ZERO(i) \
  sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = vf_zero(); \
  if (rows > i) LUNAI_PREFETCH(e->c + i * e->c_row); \
  if (rows > i) LUNAI_PREFETCH(e->c + i * e->c_row + LUNAI_NR - 1);
#define LUNAI_TILE_STEP(i) \
  if (rows > i) { \
    const vf x = vf_set(at[i / 3][i % 3 * a_row]); \
    sum[i][0] = vf_fma(x, panel[0], sum[i][0]); \
    sum[i][1] = vf_fma(x, panel[1], sum[i][1]); \
    if (LUNAI_NV > 2) sum[i][2] = vf_fma(x, panel[2], sum[i][2]); \
    if (LUNAI_NV > 3) sum[i][3] = vf_fma(x, panel[3], sum[i][3]); \
  }
#define LUNAI_TILE_STORE(i) \
  if (rows > i) { \
    LUNAI_K(tile_store)(sum[i][0], scale, bias[0], lowest, e, i, 0); \
    LUNAI_K(tile_store)(sum[i][1], scale, bias[1], lowest, e, i, VF); \
    if (LUNAI_NV > 2) LUNAI_K(tile_store)(sum[i][2], scale, bias[2], lowest, e, i, 2 * VF); \
    if (LUNAI_NV > 3) LUNAI_K(tile_store)(sum[i][3], scale, bias[3], lowest, e, i, 3 * VF); \
  }
LUNAI_INLINE void LUNAI_K(tile_store)(vf sum, vf scale, vf bias, vf lowest, const lunai_epilogue *e, int i, int j) {
  vf v = vf_mul(scale, sum);
  if (e->from) v = vf_add(vf_load(e->from + i * e->from_row + j), v);
  vf_store(e->c + i * e->c_row + j, vf_max(lowest, vf_add(v, bias)));
}
LUNAI_INLINE void LUNAI_K(tile_rows)(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                                     const float *b, int64_t b_row,
                                     const lunai_epilogue *e) {
  const vf scale = vf_set(e->alpha), lowest = vf_set(e->lowest);
  const float *at[5];
  vf sum[14][4], panel[4], bias[4];
  int i;
  at[0] = a;
  at[1] = a + 3 * a_row;
  at[2] = a + 6 * a_row;
  at[3] = a + 9 * a_row;
  at[4] = a + 12 * a_row;
  LUNAI_ROWS(LUNAI_TILE_ZERO)
  for (; k > 0; k--) {
    panel[0] = vf_load(b);
    panel[1] = vf_load(b + VF);
    if (LUNAI_NV > 2) panel[2] = vf_load(b + 2 * VF);
    if (LUNAI_NV > 3) panel[3] = vf_load(b + 3 * VF);
    LUNAI_ROWS(LUNAI_TILE_STEP)
    b += b_row;
    at[0] += a_column;
    at[1] += a_column;
    at[2] += a_column;
    at[3] += a_column;
    at[4] += a_column;
  }
  for (i = 0; i < LUNAI_NV; i++) bias[i] = e->bias ? vf_load(e->bias + i * VF) : vf_zero();
  LUNAI_ROWS(LUNAI_TILE_STORE)
}
#define LUNAI_NARROW_STEP(i) \
  if (LUNAI_MR > i) { \
    sum[i][0] = vf_fma(vf_set(at[i / 3][i % 3 * a_row]), panel, sum[i][0]); \
    sum[i][1] = vf_fma(vf_set(at[i / 3][(i % 3 + LUNAI_MR) * a_row]), panel, sum[i][1]); \
  }
#define LUNAI_NARROW_STORE(i) \
  if (LUNAI_MR > i) { \
    LUNAI_K(tile_store)(sum[i][0], scale, bias, lowest, e, i, 0); \
    LUNAI_K(tile_store)(sum[i][1], scale, bias, lowest, e, i + LUNAI_MR, 0); \
  }
LUNAI_FN void LUNAI_K(tile_narrow)(int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                                   int64_t b_row,
                                   const lunai_epilogue *e) {
  const vf scale = vf_set(e->alpha), lowest = vf_set(e->lowest), bias = e->bias ? vf_load(e->bias) : vf_zero();
  const int rows = LUNAI_MR;
  const float *at[5];
  vf sum[14][4];
  at[0] = a;
  at[1] = a + 3 * a_row;
  at[2] = a + 6 * a_row;
  at[3] = a + 9 * a_row;
  at[4] = a + 12 * a_row;
  LUNAI_ROWS(LUNAI_TILE_ZERO)
  for (; k > 0; k--) {
    const vf panel = vf_load(b);
    LUNAI_ROWS(LUNAI_NARROW_STEP)
    b += b_row;
    at[0] += a_column;
    at[1] += a_column;
    at[2] += a_column;
    at[3] += a_column;
    at[4] += a_column;
  }
  LUNAI_ROWS(LUNAI_NARROW_STORE)
}
/* The height of the next tile when `left` rows are left: MR, but where that would leave 1 or 2; then 8, 4, 3, 2 or 1.
   Below four rows a tile waits for its own sums. */
LUNAI_INLINE int64_t LUNAI_K(tile_height)(int64_t left) {
  if (left == LUNAI_MR || left > LUNAI_MR + 2 || LUNAI_MR == 1) return LUNAI_MR;
  return LUNAI_MR > 8 && left >= 8 ? 8 : LUNAI_MR > 4 && left >= 4 ? 4 : lunai_min(left, 3);
}
LUNAI_FN void LUNAI_K(tile)(int64_t rows, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                            int64_t b_row, const lunai_epilogue *e) {
  if (rows == LUNAI_MR) LUNAI_K(tile_rows)(LUNAI_MR, k, a, a_row, a_column, b, b_row, e);
  else if (LUNAI_MR > 8 && rows == 8) LUNAI_K(tile_rows)(8, k, a, a_row, a_column, b, b_row, e);
  else if (LUNAI_MR > 4 && rows == 4) LUNAI_K(tile_rows)(4, k, a, a_row, a_column, b, b_row, e);
  else if (LUNAI_MR > 1 && rows == 3) LUNAI_K(tile_rows)(3, k, a, a_row, a_column, b, b_row, e);
  else if (LUNAI_MR > 1 && rows == 2) LUNAI_K(tile_rows)(2, k, a, a_row, a_column, b, b_row, e);
  else LUNAI_K(tile_rows)(1, k, a, a_row, a_column, b, b_row, e);
}

/* epilogues that a tile cannot do: edges, activations other than ReLU, two results; `tile` is [rows, NR] */
LUNAI_FN void LUNAI_K(finish_tile)(const lunai_target *t, int64_t i, int64_t j, int64_t rows, int64_t columns,
                                   float *tile) {
  const int64_t sum_at = i * t->sum_row + j, from_at = i * t->from_row + j, c_at = i * t->c_row + j;
  int64_t r, l;
  for (r = 0; r < rows; r++)
    for (l = 0; l < columns; l += VF) {
      const int64_t left = columns - l;
      vf v = vf_load(tile + r * LUNAI_NR + l);
      if (t->from) v = vf_add(LUNAI_K(get)(t->from + from_at + r * t->from_row + l, left), v);
      if (t->finish && t->bias) v = vf_add(v, LUNAI_K(get)(t->bias + j + l, left));
      if (t->finish && t->pre) LUNAI_K(put)(t->pre + c_at + r * t->c_row + l, v, left);
      if (t->finish) vf_store(tile + r * LUNAI_NR + l, v);
      else LUNAI_K(put)(t->sum + sum_at + r * t->sum_row + l, v, left);
    }
  if (!t->finish) return;
  if (t->activation != LUNA_ACTIVATION_NONE) LUNAI_K(activate)(t->activation, rows * LUNAI_NR, tile, tile);
  for (r = 0; r < rows; r++)
    for (l = 0; l < columns; l += VF) {
      float *c = t->c + c_at + r * t->c_row + l;
      const vf v = vf_load(tile + r * LUNAI_NR + l);
      LUNAI_K(put)(c, t->late ? vf_add(v, LUNAI_K(get)(c, columns - l)) : v, columns - l);
    }
}

/* the epilogue of the tile at (row, column j), written to C or (`edge`) to a buffer first */
LUNAI_INLINE lunai_epilogue LUNAI_K(epilogue_of)(const lunai_target *t, int64_t row, int64_t j, float *edge) {
  lunai_epilogue e;
  e.bias = !edge && t->finish && t->bias ? t->bias + j : NULL;
  e.c = edge ? edge : t->sum + row * t->sum_row + j;
  e.c_row = edge ? LUNAI_NR : t->sum_row;
  e.alpha = t->alpha;
  e.lowest = !edge && t->finish && t->activation == LUNA_ACTIVATION_RELU ? 0 : -(float)INFINITY;
  e.from = !edge && t->from ? t->from + row * t->from_row + j : NULL;
  e.from_row = t->from_row;
  return e;
}

/* A tile's rows of A, at row `row` of those from `first` on; a_gathered: a buffer that they are copied to, or null. */
LUNAI_INLINE const float *LUNAI_K(tile_a)(int64_t m, int64_t k, int64_t first, int64_t row, int64_t rows,
                                          const float *a, float *a_gathered, int64_t *a_row, int64_t *a_column) {
  const float *at = a + row * *a_row;
  const int64_t tile = (row - first) / LUNAI_MR % LUNAI_TILES_ABREAST;
  if (LUNAI_MR == 1 || !a_gathered) return at;
  if (*a_column != 1 && *a_row == 1 && rows == LUNAI_MR) {
    if (tile == 0)
      LUNAI_K(gather_columns)(lunai_min((m - row) / LUNAI_MR, LUNAI_TILES_ABREAST), k, at, *a_column, a_gathered);
    a_gathered += tile * LUNAI_MR * LUNAI_KA;
  } else LUNAI_K(gather_rows)(rows, k, at, *a_row, *a_column, a_gathered);
  *a_row = *a_column == 1 ? LUNAI_KA : 1;
  *a_column = *a_column == 1 ? 1 : LUNAI_MR;
  return a_gathered;
}

/* m rows of A by the panels of a block. The tile's rows stay in L1 while the panels stream from L2 and the next tile's
   rows are prefetched; C is accessed row by row. */
LUNAI_FN void LUNAI_K(panels)(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                              float *a_gathered, const float *panel, int64_t panel_step, int64_t b_row,
                              const lunai_target *t) {
  const bool plain = t->activation == LUNA_ACTIVATION_NONE || t->activation == LUNA_ACTIVATION_RELU;
  const bool simple = !t->finish || (!t->pre && !t->late && plain);
  const int64_t all = lunai_divide_up(n, LUNAI_NR);
  const int64_t narrow = n <= VF && LUNAI_NV == 2 ? m / (2 * LUNAI_MR) * 2 * LUNAI_MR : 0;
  float edge[2 * LUNAI_MR * LUNAI_NR];
  lunai_epilogue e;
  int64_t row, rows, j, p, x;
  for (row = 0; row < narrow; row += 2 * LUNAI_MR) {
    e = LUNAI_K(epilogue_of)(t, row, 0, simple && n == VF ? NULL : edge);
    LUNAI_K(tile_narrow)(k, a + row * a_row, a_row, a_column, panel, b_row, &e);
    if (e.c == edge) LUNAI_K(finish_tile)(t, row, 0, 2 * LUNAI_MR, n, edge);
  }
  for (; row < m; row += rows) {
    const float *at, *b = panel, *next;
    int64_t at_row = a_row, at_column = a_column, coming;
    rows = LUNAI_K(tile_height)(m - row);
    at = LUNAI_K(tile_a)(m, k, narrow, row, rows, a, a_gathered, &at_row, &at_column);
    next = a + (row + rows) * a_row;
    coming = lunai_min(rows, m - row - rows);
    for (j = 0; j < n; j += LUNAI_NR, b += panel_step) {
      const int64_t columns = lunai_min(n - j, LUNAI_NR);
      if (LUNAI_MR > 1 && a_column == 1)
        for (p = j / LUNAI_NR; p < coming; p += all)
          for (x = 0; x < k; x += 16) LUNAI_PREFETCH(next + p * a_row + x);
      e = LUNAI_K(epilogue_of)(t, row, j, simple && columns == LUNAI_NR ? NULL : edge);
      LUNAI_K(tile)(rows, k, at, at_row, at_column, b, b_row, &e);
      if (e.c == edge) LUNAI_K(finish_tile)(t, row, j, rows, columns, edge);
    }
  }
}

/* Few rows by the transpose of a row-major matrix, as a linear layer's weight in decoding: each element is a dot
   product by lanes, so that the matrix is read once and in order, at memory bandwidth. */
LUNAI_INLINE vf LUNAI_K(dot_lanes)(bool whole, int64_t k, const float *a, const float *b) {
  vf sum0 = vf_zero(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t p = 0;
  for (; p + 4 * VF <= k; p += 4 * VF) {
    sum0 = vf_fma(vf_load(a + p), vf_load(b + p), sum0);
    sum1 = vf_fma(vf_load(a + p + VF), vf_load(b + p + VF), sum1);
    sum2 = vf_fma(vf_load(a + p + 2 * VF), vf_load(b + p + 2 * VF), sum2);
    sum3 = vf_fma(vf_load(a + p + 3 * VF), vf_load(b + p + 3 * VF), sum3);
  }
  for (; p < k && !whole; p += VF) sum0 = vf_fma(LUNAI_K(get)(a + p, k - p), LUNAI_K(get)(b + p, k - p), sum0);
  return vf_add(vf_add(sum0, sum1), vf_add(sum2, sum3));
}
/* by n <= NR columns from b on; a loop, as hardware prefetchers go by the load instruction's address */
LUNAI_INLINE void LUNAI_K(dots)(bool whole, int64_t n, int64_t k, const float *a, const float *b, int64_t b_column,
                                float alpha, float *out) {
  vf dot[LUNAI_NR];
  int64_t i;
  for (i = 0; i < n; i++, b += b_column) dot[i] = LUNAI_K(dot_lanes)(whole, k, a, b);
  for (; i % 4; i++) dot[i] = vf_zero();
  for (i = 0; i < n; i += 4) LUNAI_K(sum4)(dot + i, alpha, out + i);
}
LUNAI_FN void LUNAI_K(dot_rows)(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, const float *b,
                                int64_t b_column, const lunai_target *t) {
  const int64_t group = m > 1 ? 4 : LUNAI_NR; /* columns that stay in L1 for several rows */
  float edge[4 * LUNAI_NR];
  int64_t i, j, l, r;
  if (n % VF) memset(edge, 0, sizeof edge); /* all lanes of a vector are read */
  for (j = 0; j < n; j += LUNAI_NR)
    for (i = 0; i < m; i += 4) {
      const int64_t columns = lunai_min(n - j, LUNAI_NR), rows = lunai_min(m - i, 4);
      const float *x = a + i * a_row, *y = b + j * b_column;
      for (l = 0; l < columns; l += group)
        for (r = 0; r < rows; r++) {
          const int64_t count = lunai_min(columns - l, group);
          float *to = edge + r * LUNAI_NR + l;
          if (VF > 1 && k % (4 * VF) == 0)
            LUNAI_K(dots)(true, count, k, x + r * a_row, y + l * b_column, b_column, t->alpha, to);
          else LUNAI_K(dots)(false, count, k, x + r * a_row, y + l * b_column, b_column, t->alpha, to);
        }
      LUNAI_K(finish_tile)(t, i, j, rows, columns, edge);
    }
}

#elif !defined(LUNAI_PASS)

/* ---- gemm's driver ---- */
LUNAI_FN int64_t lunai_panels_size(const lunai_kernels *kernels, int64_t n, int64_t k) {
  return lunai_divide_up(n, kernels->nr) * kernels->nr * k;
}

/* C = alpha A B (+ C) with n columns of B in panels: copied ones (b_row NR), or B's own columns where n is a
   multiple of NR */
LUNAI_FN void lunai_matmul_blocks(const lunai_kernels *kernels, int64_t m, int64_t n, int64_t k, const float *a,
                                  int64_t a_row, int64_t a_column, const float *panel, int64_t panel_step,
                                  int64_t b_row, float alpha, float *c, int64_t c_row, bool accumulate) {
  lunai_target t;
  int64_t p = 0;
  memset(&t, 0, sizeof t);
  t.sum = c;
  t.sum_row = t.from_row = c_row;
  t.alpha = alpha;
  t.from = accumulate ? c : NULL;
  do {
    kernels->panels(m, n, lunai_min(k - p, LUNAI_KC), a + p * a_column, a_row, a_column, NULL, panel + p * b_row,
                    panel_step, b_row, &t);
    t.from = c;
    p += LUNAI_KC;
  } while (p < k);
}
LUNAI_FN void lunai_matmul_panels(const lunai_kernels *kernels, int64_t m, int64_t n, int64_t k, const float *a,
                                  int64_t a_row, int64_t a_column, const float *panels, float alpha, float *c,
                                  int64_t c_row, bool accumulate) {
  lunai_matmul_blocks(kernels, m, n, k, a, a_row, a_column, panels, kernels->nr * k, kernels->nr, alpha, c, c_row,
                      accumulate);
}
LUNAI_FN void lunai_matmul(const lunai_kernels *kernels, int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row,
                           int64_t a_column, const float *b, int64_t b_row, int64_t b_column, float alpha, float *c,
                           int64_t c_row, bool accumulate, float *panels) {
  const int64_t nr = kernels->nr;
  /* copying pays when a panel is read more than twice */
  const int64_t whole = b_column == 1 && m <= 2 * kernels->mr ? n / nr * nr : 0;
  if (whole) lunai_matmul_blocks(kernels, m, whole, k, a, a_row, a_column, b, nr, b_row, alpha, c, c_row, accumulate);
  if (whole == n) return;
  kernels->fill_panels(n - whole, k, b + whole * b_column, b_row, b_column, panels);
  lunai_matmul_panels(kernels, m, n - whole, k, a, a_row, a_column, panels, alpha, c + whole, c_row, accumulate);
}

/* How a gemm is shared out: each batch item in row_parts x column_parts, each part with panels of its own, so that
   threads never wait for each other; and the scratch of a thread. `late`: C is added after the activation, so
   partial sums need their own place. */
typedef struct lunai_gemm_plan {
  const lunai_kernels *kernels;
  const lunai_gemm *g;
  char *scratch;
  int64_t row_parts, column_parts, columns;       /* columns: of a block */
  int64_t a_size, b_size, sum_size;               /* floats */
  bool late;
} lunai_gemm_plan;

LUNAI_FN int64_t lunai_gemm_plan_bytes(const lunai_gemm_plan *p) {
  return lunai_floats(p->a_size) + lunai_floats(p->b_size) + lunai_floats(p->sum_size);
}
LUNAI_FN lunai_gemm_plan lunai_gemm_plan_of(const lunai_kernels *kernels, const lunai_gemm *g, int64_t threads) {
  const int64_t batch = g->batch[0] * g->batch[1], block_k = lunai_min(g->k, LUNAI_KC), mr = kernels->mr,
                nr = kernels->nr;
  const int64_t parts = threads == 1 || batch % threads == 0 || batch >= 4 * threads ? 1 : threads;
  const bool dense = g->a_column == 1 && g->a_row == g->k && g->k <= LUNAI_KC;
  lunai_gemm_plan p;
  memset(&p, 0, sizeof p);
  p.kernels = kernels;
  p.g = g;
  p.row_parts = p.column_parts = 1;
  if (parts > 1) {
    const int64_t tiles = lunai_max(lunai_divide_up(g->m, mr), 1), panels = lunai_max(lunai_divide_up(g->n, nr), 1);
    if (g->m < g->n) p.column_parts = lunai_min(parts, panels);
    p.row_parts = lunai_min(parts / p.column_parts, tiles);
    if (g->m >= g->n) p.column_parts = lunai_min(parts / p.row_parts, panels);
  }
  p.late = g->accumulate && (g->activation != LUNA_ACTIVATION_NONE || g->pre);
  /* few rows: panels are read at once, so keep them in the cache */
  p.columns = g->m <= 2 * mr ? 4 * nr : LUNAI_NC / nr * nr;
  p.columns = lunai_min(p.columns, lunai_divide_up(lunai_max(g->n, 1), nr) * nr);
  p.b_size = g->b_panels ? 0 : p.columns * block_k;
  if (mr > 1 && g->n > 2 * nr && g->m > 1 && !dense)
    p.a_size = mr * LUNAI_KA * (g->a_row == 1 && g->a_column != 1 ? LUNAI_TILES_ABREAST : 1);
  if (p.late && !g->pre && g->k > LUNAI_KC) p.sum_size = lunai_min(LUNAI_SUM_ROWS, g->m) * p.columns;
  return p;
}

/* a thread's own memory, and the block of B whose panels it holds: batch items often share B */
typedef struct lunai_gemm_thread {
  float *a, *b, *sum;
  const float *held;
  int64_t held_n, held_k;
} lunai_gemm_thread;

/* the panels of a B that several products read, block of k after block of k */
typedef struct lunai_panels_work {
  const lunai_kernels *kernels; const lunai_gemm *g; float *panels;
} lunai_panels_work;
LUNAI_FN int64_t lunai_panels_at(const lunai_kernels *kernels, const lunai_gemm *g, int64_t column, int64_t p) {
  return lunai_panels_size(kernels, g->n, p) + column * lunai_min(g->k - p, LUNAI_KC);
}
LUNAI_FN void lunai_panels_task(void *work, int64_t thread, int64_t threads) {
  const lunai_panels_work *w = (const lunai_panels_work *)work;
  const lunai_gemm *g = w->g;
  const int64_t nr = w->kernels->nr, panels = lunai_divide_up(g->n, nr),
                column = lunai_share(panels, thread, threads) * nr;
  const int64_t n = lunai_min(g->n, lunai_share(panels, thread + 1, threads) * nr) - column;
  int64_t p;
  for (p = 0; n > 0 && p < g->k; p += LUNAI_KC)
    w->kernels->fill_panels(n, lunai_min(g->k - p, LUNAI_KC), g->b + p * g->b_row + column * g->b_column, g->b_row,
                            g->b_column, w->panels + lunai_panels_at(w->kernels, g, column, p));
}
LUNAI_FN size_t lunai_panels_bytes(const lunai_kernels *kernels, int64_t n, int64_t k) {
  return lunai_round((size_t)lunai_panels_size(kernels, n, k) * sizeof(float));
}
LUNAI_FN void lunai_run_make_panels(const lunai_kernels *kernels, const lunai_gemm *g, const lunai_parallel *parallel,
                                    void *panels) {
  lunai_panels_work w;
  w.kernels = kernels;
  w.g = g;
  w.panels = (float *)panels;
  lunai_run(parallel, lunai_panels_task, &w);
}

/* m rows by the n columns of a block from `column` on, over all of k */
LUNAI_FN void lunai_gemm_block(const lunai_gemm_plan *plan, lunai_gemm_thread *thread, int64_t m, int64_t n,
                               int64_t column, const float *a, const float *b, lunai_target *t) {
  const lunai_kernels *kernels = plan->kernels;
  const lunai_gemm *g = plan->g;
  int64_t p = 0;
  if (g->accumulate && !plan->late) {
    t->from = t->sum;
    t->from_row = t->sum_row;
  }
  do {
    const int64_t k = lunai_min(g->k - p, LUNAI_KC);
    const float *from = b + p * g->b_row;
    const float *panels = g->b_panels ? g->b_panels + lunai_panels_at(kernels, g, column, p) : thread->b;
    if (panels == thread->b && (thread->held != from || thread->held_n != n || thread->held_k != k))
      kernels->fill_panels(n, k, from, g->b_row, g->b_column, thread->b);
    thread->held = from;
    thread->held_n = n;
    thread->held_k = k;
    t->finish = p + k >= g->k && (t->bias || t->pre || t->activation != LUNA_ACTIVATION_NONE || plan->late);
    kernels->panels(m, n, k, a + p * g->a_column, g->a_row, g->a_column, plan->a_size ? thread->a : NULL, panels,
                    kernels->nr * k, kernels->nr, t);
    t->from = t->sum;
    t->from_row = t->sum_row;
    p += LUNAI_KC;
  } while (p < g->k);
}

/* rows [row, row_end) by columns [column, column_end) of batch item x, y */
LUNAI_FN void lunai_gemm_part(const lunai_gemm_plan *plan, lunai_gemm_thread *thread, int64_t x, int64_t y, int64_t row,
                              int64_t row_end, int64_t column, int64_t column_end) {
  const lunai_gemm *g = plan->g;
  const int64_t step = plan->sum_size ? LUNAI_SUM_ROWS : row_end - row;
  const float *a = g->a + x * g->a_batch[0] + y * g->a_batch[1], *b = g->b + x * g->b_batch[0] + y * g->b_batch[1];
  lunai_target t;
  int64_t j;
  memset(&t, 0, sizeof t);
  t.c_row = g->c_row;
  t.alpha = g->alpha;
  t.activation = g->activation;
  t.late = plan->late;
  for (; row < row_end; row += step)
    for (j = column; j < column_end; j += plan->columns) {
      const int64_t at = x * g->c_batch[0] + y * g->c_batch[1] + row * g->c_row + j;
      t.c = g->c + at;
      t.pre = g->pre ? g->pre + at : NULL;
      t.bias = g->bias ? g->bias + j : NULL;
      t.sum = plan->sum_size ? thread->sum : plan->late && t.pre ? t.pre : t.c;
      t.sum_row = plan->sum_size ? plan->columns : g->c_row;
      t.from = g->residual ? g->residual + at : NULL;
      t.from_row = g->c_row;
      lunai_gemm_block(plan, thread, lunai_min(row_end - row, step), lunai_min(column_end - j, plan->columns), j,
                       a + row * g->a_row, b + j * g->b_column, &t);
    }
}
LUNAI_FN lunai_gemm_thread lunai_gemm_own(const lunai_gemm_plan *p, int64_t thread) {
  char *scratch = p->scratch + thread * lunai_gemm_plan_bytes(p);
  lunai_gemm_thread own;
  memset(&own, 0, sizeof own);
  own.a = lunai_take(&scratch, p->a_size);
  own.b = lunai_take(&scratch, p->b_size);
  own.sum = lunai_take(&scratch, p->sum_size);
  return own;
}
LUNAI_FN void lunai_gemm_task(void *work, int64_t thread, int64_t threads) {
  const lunai_gemm_plan *p = (const lunai_gemm_plan *)work;
  const lunai_gemm *g = p->g;
  const int64_t parts = p->row_parts * p->column_parts, units = g->batch[0] * g->batch[1] * parts;
  const int64_t mr = p->kernels->mr, nr = p->kernels->nr, tiles = lunai_divide_up(g->m, mr),
                panels = lunai_divide_up(g->n, nr);
  lunai_gemm_thread own = lunai_gemm_own(p, thread);
  int64_t unit, end = lunai_share(units, thread + 1, threads);
  for (unit = lunai_share(units, thread, threads); unit < end; unit++) {
    const int64_t part = unit % parts, r = part / p->column_parts, c = part % p->column_parts;
    const int64_t row = lunai_share(tiles, r, p->row_parts) * mr, row_end = lunai_share(tiles, r + 1,
                                                                                        p->row_parts) * mr;
    const int64_t column = lunai_share(panels, c, p->column_parts) * nr,
                  column_end = lunai_share(panels, c + 1, p->column_parts) * nr;
    lunai_gemm_part(p, &own, unit / parts / g->batch[1], unit / parts % g->batch[1], row, lunai_min(g->m, row_end),
                    column, lunai_min(g->n, column_end));
  }
}
/* products by dots, which need neither panels nor partial sums: each thread has columns of its own */
LUNAI_FN bool lunai_gemm_dots(const lunai_gemm *g) { return g->dots && g->a_column == 1 && g->b_row == 1; }
typedef struct lunai_dots_work { const lunai_kernels *kernels; const lunai_gemm *g; } lunai_dots_work;
LUNAI_FN void lunai_dots_task(void *work, int64_t thread, int64_t threads) {
  const lunai_dots_work *w = (const lunai_dots_work *)work;
  const lunai_gemm *g = w->g;
  const int64_t nr = w->kernels->nr, panels = threads > 1 ? lunai_divide_up(g->n, nr) : 0;
  const int64_t column = lunai_share(panels, thread, threads) * nr;
  const int64_t end = threads > 1 ? lunai_min(g->n, lunai_share(panels, thread + 1, threads) * nr) : g->n;
  lunai_target t;
  int64_t x, y;
  memset(&t, 0, sizeof t);
  t.sum_row = t.from_row = t.c_row = g->c_row;
  t.bias = g->bias ? g->bias + column : NULL;
  t.alpha = g->alpha;
  t.activation = g->activation;
  t.late = g->accumulate && (g->activation != LUNA_ACTIVATION_NONE || g->pre);
  t.finish = g->bias || g->pre || g->activation != LUNA_ACTIVATION_NONE;
  for (x = 0; x < g->batch[0]; x++)
    for (y = 0; y < g->batch[1] && column < end; y++) {
      const int64_t at = x * g->c_batch[0] + y * g->c_batch[1] + column;
      t.c = t.sum = g->c + at;
      t.pre = g->pre ? g->pre + at : NULL;
      t.from = g->accumulate && !t.late ? t.c : g->residual ? g->residual + at : NULL;
      w->kernels->dot_rows(g->m, end - column, g->k, g->a + x * g->a_batch[0] + y * g->a_batch[1], g->a_row,
                           g->b + x * g->b_batch[0] + y * g->b_batch[1] + column * g->b_column, g->b_column, &t);
    }
}
LUNAI_FN size_t lunai_gemm_scratch(const lunai_kernels *kernels, const lunai_gemm *g, int64_t threads) {
  const int64_t count = lunai_max(threads, 1);
  lunai_gemm_plan p;
  if (lunai_gemm_dots(g)) return 0;
  p = lunai_gemm_plan_of(kernels, g, count);
  return (size_t)(lunai_gemm_plan_bytes(&p) * count);
}
LUNAI_FN void lunai_run_gemm(const lunai_kernels *kernels, const lunai_gemm *g, const lunai_parallel *parallel,
                             void *scratch) {
  const int64_t threads = lunai_threads(parallel);
  lunai_gemm_plan p;
  lunai_gemm_thread own;
  lunai_dots_work dots;
  int64_t x, y;
  if (g->m <= 0 || g->n <= 0) return;
  if (lunai_gemm_dots(g)) {
    dots.kernels = kernels;
    dots.g = g;
    lunai_run(parallel, lunai_dots_task, &dots);
    return;
  }
  p = lunai_gemm_plan_of(kernels, g, threads);
  p.scratch = scratch ? (char *)scratch : (char *)g->c; /* without k it needs none, and null + 0 is undefined */
  if (threads > 1) {
    lunai_run(parallel, lunai_gemm_task, &p);
    return;
  }
  own = lunai_gemm_own(&p, 0);       /* one part, without a division */
  for (x = 0; x < g->batch[0]; x++)
    for (y = 0; y < g->batch[1]; y++) lunai_gemm_part(&p, &own, x, y, 0, g->m, 0, g->n);
}
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>elementwise: maps, sums, softmax, layer norm, cross-entropy, the short convolution, dropout, optimisers
   All arrays dense, of any size and alignment; a map may be computed in place.
   Long sums: short float sums, added up in double in a fixed order. Column sums treat each column alone, so that its
   bits do not depend on which columns are computed with it. Guarded by tests/elementwise.c
   ------------------------------------------------------------------------------------------------------------------ */
#ifndef LUNAI_PASS
/* ---- the reference ---- */
#define LUNAI_MAP_REFERENCE(name, arguments, y, value) \
  LUNAI_FN void lunai_##name##_reference arguments { \
    int64_t i; \
    for (i = 0; i < n; i++) (y)[i] = (value); \
  }
LUNAI_MAP_REFERENCE(activate, (int kind, int64_t n, const float *x, float *y), y, lunai_activation_scalar(kind, x[i]))
LUNAI_MAP_REFERENCE(activate_backward, (int kind, int64_t n, const float *x, const float *dy, float *dx), dx,
                    dx[i] + dy[i] * lunai_slope_scalar(kind, x[i]))
LUNAI_MAP_REFERENCE(activate_slope, (int kind, int64_t n, const float *x, const float *dy, float *y), y,
                    dy[i] * lunai_slope_scalar(kind, x[i]))
LUNAI_MAP_REFERENCE(add, (int64_t n, const float *a, const float *b, float *y), y, a[i] + b[i])
LUNAI_MAP_REFERENCE(mul, (int64_t n, const float *a, const float *b, float *y), y, a[i] * b[i])
LUNAI_MAP_REFERENCE(scale, (int64_t n, float factor, const float *x, float *y), y, factor * x[i])
LUNAI_MAP_REFERENCE(scale_add, (int64_t n, float factor, const float *x, float *y), y, y[i] + factor * x[i])
#undef LUNAI_MAP_REFERENCE
/* LUNA_ELEMENTWISE; step: 1, or 0 of an input that repeats */
LUNAI_FN void lunai_elementwise_reference(int kind, const float *const *x, const int64_t *step, int64_t n, float *y) {
  int64_t i;
  for (i = 0; i < n; i++) y[i] = lunai_each_scalar(kind, x[0][i * step[0]], x[1][i * step[1]], x[2][i * step[2]]);
}
LUNAI_FN void lunai_elementwise_slope_reference(int kind, int input, const float *const *x, const int64_t *step,
                                                int64_t n, const float *dy, float *y, bool add) {
  int64_t i;
  for (i = 0; i < n; i++)
    y[i] = (add ? y[i] : 0) + lunai_each_slope_scalar(kind, input, x[0][i * step[0]], x[1][i * step[1]],
                                                      x[2][i * step[2]], dy[i]);
}

LUNAI_FN double lunai_sum_reference(int64_t n, const float *x) {
  double sum = 0;
  int64_t i;
  for (i = 0; i < n; i++) sum += (double)x[i];
  return sum;
}
LUNAI_FN double lunai_sum_squares_reference(int64_t n, const float *x) { return lunai_inner(n, x, 1, x, 1); }
LUNAI_FN float lunai_dot_reference(int64_t n, const float *a, const float *b) { return (float)lunai_inner(n, a, 1, b,
                                                                                                          1); }

/* y = exp(x - max) / sum; a row of -Inf alone gives 0 */
LUNAI_FN void lunai_softmax_reference(int64_t rows, int64_t n, const float *x, float *y) {
  for (; rows > 0; rows--, x += n, y += n) {
    float max = -(float)INFINITY;
    double sum = 0;
    int64_t i;
    for (i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    if (max == -(float)INFINITY) max = 0;
    for (i = 0; i < n; i++) sum += (double)(y[i] = lunai_exp1_scalar(x[i] - max));
    for (i = 0; i < n; i++) y[i] = sum == 0 ? 0 : (float)((double)y[i] / sum);
  }
}
/* dx += y (dy - sum of y dy) */
LUNAI_FN void lunai_softmax_backward_reference(int64_t rows, int64_t n, const float *y, const float *dy, float *dx) {
  for (; rows > 0; rows--, y += n, dy += n, dx += n) {
    const double mean = lunai_inner(n, y, 1, dy, 1);
    int64_t i;
    for (i = 0; i < n; i++) dx[i] += (float)((double)y[i] * ((double)dy[i] - mean));
  }
}

/* y = (x - mean) rstd weight + bias, rstd = 1 / sqrt(variance + epsilon) */
LUNAI_FN void lunai_layer_norm_reference(int64_t rows, int64_t n, const float *x, const float *weight,
                                         const float *bias, float epsilon, float *y, float *mean, float *rstd) {
  int64_t row, i;
  for (row = 0; row < rows && n > 0; row++, x += n, y += n) {
    const double center = lunai_sum_reference(n, x) / (double)n;
    double variance = 0, r;
    for (i = 0; i < n; i++) variance += ((double)x[i] - center) * ((double)x[i] - center) / (double)n;
    r = 1 / sqrt(variance + (double)epsilon);
    for (i = 0; i < n; i++) {
      const double normal = ((double)x[i] - center) * r;
      y[i] = (float)(normal * (weight ? (double)weight[i] : 1) + (bias ? (double)bias[i] : 0));
    }
    if (mean) mean[row] = (float)center;
    if (rstd) rstd[row] = (float)r;
  }
}
/* y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + epsilon): as a layer norm of mean 0 [arXiv 1910.07467] */
LUNAI_FN void lunai_rms_norm_reference(int64_t rows, int64_t n, const float *x, const float *weight, float epsilon,
                                       float *y, float *mean, float *rstd) {
  int64_t row, i;
  for (row = 0; row < rows && n > 0; row++, x += n, y += n) {
    const double r = 1 / sqrt(lunai_sum_squares_reference(n, x) / (double)n + (double)epsilon);
    for (i = 0; i < n; i++) y[i] = (float)((double)x[i] * r * (weight ? (double)weight[i] : 1));
    if (mean) mean[row] = 0;
    if (rstd) rstd[row] = (float)r;
  }
}
/* dx = rstd (g - mean(g) - xhat mean(g xhat)) (+ dx), g = dy weight, xhat = (x - mean) rstd; rms: without mean(g) */
LUNAI_FN void lunai_layer_norm_backward_reference(bool rms, int64_t rows, int64_t n, const float *x,
                                                  const float *weight,
                                                  const float *mean, const float *rstd, const float *dy, float *dx,
                                                  bool add) {
  int64_t row, i;
  for (row = 0; row < rows; row++, x += n, dy += n, dx += n) {
    const double center = (double)mean[row], r = (double)rstd[row];
    double mean_g = 0, mean_gx = 0;
    for (i = 0; i < n; i++) {
      const double g = (double)dy[i] * (weight ? (double)weight[i] : 1);
      mean_g += rms ? 0 : g / (double)n;
      mean_gx += g * ((double)x[i] - center) * r / (double)n;
    }
    for (i = 0; i < n; i++) {
      const double g = (double)dy[i] * (weight ? (double)weight[i] : 1), xhat = ((double)x[i] - center) * r;
      dx[i] = (float)(r * (g - mean_g - xhat * mean_gx)) + (add ? dx[i] : 0);
    }
  }
}
/* columns [first, last): dweight += sum over rows of dy xhat, dbias += sum over rows of dy */
LUNAI_FN void lunai_layer_norm_weights_reference(int64_t rows, int64_t n, int64_t first, int64_t last, const float *x,
                                                 const float *mean, const float *rstd, const float *dy, float *dweight,
                                                 float *dbias) {
  int64_t row, i;
  for (i = first; i < last; i++) {
    double scaled = 0, sum = 0;
    for (row = 0; row < rows; row++) {
      const double g = (double)dy[row * n + i];
      scaled += g * ((double)x[row * n + i] - (double)mean[row]) * (double)rstd[row];
      sum += g;
    }
    if (dweight) dweight[i] += (float)scaled;
    if (dbias) dbias[i] += (float)sum;
  }
}
LUNAI_FN void lunai_sum_rows_reference(int64_t rows, int64_t n, int64_t row_stride, int64_t first, int64_t last,
                                       float factor, const float *x, float *y) {
  int64_t row, i;
  for (i = first; i < lunai_min(last, n); i++) {
    double sum = 0;
    for (row = 0; row < rows; row++) sum += (double)x[row * row_stride + i];
    y[i] += (float)((double)factor * sum);
  }
}

/* loss = -sum_j target_j log softmax(logits)_j, target = (1 - smoothing) onehot + smoothing / classes */
LUNAI_FN void lunai_cross_entropy_reference(const lunai_cross_entropy *a) {
  int64_t row, j;
  for (row = 0; row < a->rows; row++) {
    const float *x = a->logits + row * a->logits_row;
    const int64_t label = a->labels[row] - a->first;
    lunai_row_sums own, *s = a->sums ? a->sums + row : &own;
    double log_sum = 0, target;
    if (a->first == 0) s->exps = s->logits = s->label = 0, s->shift = -(float)INFINITY;
    for (j = 0; j < a->columns; j++) {
      if (x[j] > s->shift) {
        s->exps *= (double)lunai_exp1_scalar(s->shift - x[j]);
        s->shift = x[j];
      }
      s->exps += x[j] == -(float)INFINITY ? 0 : (double)lunai_exp1_scalar(x[j] - s->shift);
      s->logits += (double)x[j];
    }
    if (label >= 0 && label < a->columns) s->label = x[label];
    if (a->first + a->columns < a->classes) continue;
    if (a->labels[row] >= 0) log_sum = (double)s->shift + (double)lunai_log1_scalar((float)s->exps);
    target = (double)(1 - a->smoothing) * (double)s->label;
    if (a->smoothing > 0) target += (double)a->smoothing * s->logits / (double)a->classes;
    a->loss[row] = a->labels[row] < 0 ? 0 : (float)(log_sum - target);
    if (a->lse) a->lse[row] = (float)log_sum;
  }
}
/* grad = factor (softmax(logits) - target) (+ grad) */
LUNAI_FN void lunai_cross_entropy_backward_reference(const lunai_cross_entropy *a) {
  int64_t row, j;
  for (row = 0; row < a->rows; row++)
    for (j = 0; j < a->columns; j++) {
      float *grad = a->grad + row * a->grad_row + j, slope = 0;
      if (a->labels[row] >= 0) {
        slope = lunai_exp1_scalar(a->logits[row * a->logits_row + j] - a->lse[row]) - a->smoothing / (float)a->classes;
        if (a->labels[row] == a->first + j) slope -= 1 - a->smoothing;
      }
      *grad = a->factor * slope + (a->add ? *grad : 0);
    }
}

/* y_t = bias + sum_i weight_i x_(t - width + 1 + i); rows before the first are history's, or 0 */
LUNAI_FN float lunai_tap(int64_t row, int64_t n, int64_t width, int64_t channel, const float *x, const float *history) {
  return row >= 0 ? x[row * n + channel] : history ? history[(row + width - 1) * n + channel] : 0;
}
LUNAI_FN void lunai_short_convolution_reference(int64_t rows, int64_t n, int64_t width, const float *x,
                                                const float *history, const float *weight, const float *bias,
                                                float *y) {
  int64_t t, c, i;
  for (t = 0; t < rows; t++)
    for (c = 0; c < n; c++) {
      float sum = bias ? bias[c] : 0;
      for (i = 0; i < width; i++)
        sum += weight[c * width + i] * lunai_tap(t - width + 1 + i, n, width, c, x, history);
      y[t * n + c] = sum;
    }
}
LUNAI_FN void lunai_short_convolution_backward_reference(int64_t rows, int64_t n, int64_t width, const float *weight,
                                                         const float *dy, float *dx) {
  int64_t t, c, i;
  for (t = 0; t < rows; t++)
    for (c = 0; c < n; c++)
      for (i = 0; i < width; i++)
        if (t + width - 1 - i < rows) dx[t * n + c] += weight[c * width + i] * dy[(t + width - 1 - i) * n + c];
}
LUNAI_FN void lunai_short_convolution_weights_reference(int64_t rows, int64_t n, int64_t width, int64_t first,
                                                        int64_t last, const float *x, const float *dy, float *dweight,
                                                        float *dbias) {
  int64_t t, c, i;
  for (c = first; c < last; c++) {
    for (i = 0; dweight && i < width; i++) {
      double sum = 0;
      for (t = lunai_min(rows, width - 1 - i); t < rows; t++) sum += (double)dy[t * n +
                                                                                c] * (double)x[(t - width + 1 + i) * n +
                                                                                               c];
      dweight[c * width + i] += (float)sum;
    }
    if (dbias) lunai_sum_rows_reference(rows, n, n, c, c + 1, 1, dy, dbias);
  }
}

LUNAI_FN float lunai_dropout_at(const lunai_dropout *d, int64_t element) {
  uint32_t counter[4], word[4];
  if (d->threshold == 0) return 1.0f;
  counter[0] = (uint32_t)(element / 8);
  counter[1] = (uint32_t)((uint64_t)(element / 8) >> 32);
  counter[2] = d->op;
  counter[3] = d->step;
  lunai_philox(counter, d->seed, word);
  return (word[element % 8 / 2] >> (element % 2 * 16) & 0xFFFFu) < d->threshold ? 0.0f : d->keep;
}
LUNAI_FN void lunai_dropout_reference(const lunai_dropout *d, int64_t first, int64_t n, const float *x, float *y,
                                      bool accumulate) {
  int64_t i;
  for (i = 0; i < n; i++) {
    const float mask = lunai_dropout_at(d, first + i), kept = mask > 0 ? x[i] * mask : 0; /* a dropped NaN is 0 */
    y[i] = accumulate ? y[i] + kept : kept;
  }
}

LUNAI_FN void lunai_sgd_reference(const lunai_update *u) {
  int64_t i;
  for (i = 0; i < u->count; i++) {
    float g = u->grad[i] * u->factor + u->decay * u->value[i];
    if (u->momentum != 0) {
      const float m = u->moment[0][i] = u->momentum * u->moment[0][i] + g;
      g = u->nesterov ? u->momentum * m + g : m;
    }
    u->value[i] -= u->lr * g;
    u->grad[i] = 0;
  }
}
/* m = beta1 m + (1 - beta1) g, s = beta2 s + (1 - beta2) g^2, value -= lr mhat / (sqrt(shat) + epsilon) + lr decay
   value */
LUNAI_FN void lunai_adam_reference(const lunai_update *u) {
  const float decay = u->coupled ? 0 : u->lr * u->decay, step = (float)((double)u->lr / (double)u->correction1);
  const float root = (float)(1 / sqrt((double)u->correction2));
  int64_t i;
  for (i = 0; i < u->count; i++) {
    const float v = u->value[i], g = u->grad[i] * u->factor + (u->coupled ? u->decay : 0) * v;
    const float m = u->moment[0][i] = u->beta1 * u->moment[0][i] + (1 - u->beta1) * g;
    const float s = u->moment[1][i] = u->beta2 * u->moment[1][i] + (1 - u->beta2) * (g * g);
    u->value[i] = v - decay * v - step * m / ((float)sqrt((double)s) * root + u->epsilon);
    u->grad[i] = 0;
  }
}
/* Apollo (arXiv 2009.13586, algorithm 1) with m, B, d = moment[0], [1], [2]: sums of d^4, (g - m) d and B d^2 */
LUNAI_FN void lunai_apollo_sums_reference(const lunai_update *u, double sums[3]) {
  int64_t i;
  sums[0] = sums[1] = sums[2] = 0;
  for (i = 0; i < u->count; i++) {
    const double g = (double)(u->grad[i] * u->factor + u->decay * u->value[i]), d = (double)u->moment[2][i];
    sums[0] += d * d * d * d;
    sums[1] += (g - (double)u->moment[0][i]) * d;
    sums[2] += (double)u->moment[1][i] * d * d;
  }
}
/* m += alpha (g - m), B += curvature d^2, d = m / max(|B|, 1), value -= lr d */
LUNAI_FN void lunai_apollo_reference(const lunai_update *u) {
  int64_t i;
  for (i = 0; i < u->count; i++) {
    const float g = u->grad[i] * u->factor + u->decay * u->value[i], d = u->moment[2][i];
    const float m = u->moment[0][i] += u->alpha * (g - u->moment[0][i]);
    const float b = u->moment[1][i] += u->curvature * (d * d), size = b < 0 ? -b : b;
    u->moment[2][i] = m / (size > 1 ? size : 1);
    u->value[i] -= u->lr * u->moment[2][i];
    u->grad[i] = 0;
  }
}
#endif

#ifdef LUNAI_PASS_LOOPS
#undef LUNAI_GET
#undef LUNAI_PUT
#define LUNAI_GET(p) LUNAI_K(get)((p) + i, n - i)
#define LUNAI_PUT(p, v) LUNAI_K(put)((p) + i, v, n - i)

/* ---- maps ---- */
#undef LUNAI_MAP
#define LUNAI_MAP(name, arguments, y, value) \
  LUNAI_FN void LUNAI_K(name) arguments { \
    int64_t i; \
    for (i = 0; i < n; i += VF) LUNAI_PUT(y, value); \
  }
LUNAI_MAP(activate, (int kind, int64_t n, const float *x, float *y), y, LUNAI_K(map1)(kind, LUNAI_GET(x)))
LUNAI_MAP(activate_grad, (int kind, int64_t n, const float *x, const float *dy, bool add, float *dx), dx,
          vf_fma(LUNAI_GET(dy), LUNAI_K(map1_slope)(kind, LUNAI_GET(x)), add ? LUNAI_GET(dx) : vf_zero()))
LUNAI_FN void LUNAI_K(activate_backward)(int kind, int64_t n, const float *x, const float *dy, float *dx) {
  LUNAI_K(activate_grad)(kind, n, x, dy, true, dx);
}
LUNAI_FN void LUNAI_K(activate_slope)(int kind, int64_t n, const float *x, const float *dy, float *y) {
  LUNAI_K(activate_grad)(kind, n, x, dy, false, y);
}
LUNAI_MAP(add, (int64_t n, const float *a, const float *b, float *y), y, vf_add(LUNAI_GET(a), LUNAI_GET(b)))
LUNAI_MAP(mul, (int64_t n, const float *a, const float *b, float *y), y, vf_mul(LUNAI_GET(a), LUNAI_GET(b)))
LUNAI_MAP(scale, (int64_t n, float factor, const float *x, float *y), y, vf_mul(vf_set(factor), LUNAI_GET(x)))
LUNAI_MAP(scale_add, (int64_t n, float factor, const float *x, float *y), y,
          vf_fma(vf_set(factor), LUNAI_GET(x), LUNAI_GET(y)))
#undef LUNAI_MAP

/* ---- LUNA_ELEMENTWISE, of vectors and (where step is 0) single numbers ---- */
#undef LUNAI_INPUT
#define LUNAI_INPUT(k) step[k] ? LUNAI_GET(x[k]) : vf_set(*x[k])
LUNAI_FN void LUNAI_K(elementwise)(int kind, const float *const *x, const int64_t *step, int64_t n, float *y) {
  int64_t i;
  for (i = 0; i < n; i += VF) {
    const vf a = LUNAI_INPUT(0), b = LUNAI_INPUT(1), c = LUNAI_INPUT(2);
    LUNAI_PUT(y, LUNAI_K(elementwise1)(kind, a, b, c));
  }
}
LUNAI_FN void LUNAI_K(elementwise_slope)(int kind, int input, const float *const *x, const int64_t *step, int64_t n,
                                         const float *dy, float *y, bool add) {
  int64_t i;
  for (i = 0; i < n; i += VF) {
    const vf a = LUNAI_INPUT(0), b = LUNAI_INPUT(1), c = LUNAI_INPUT(2);
    const vf v = LUNAI_K(elementwise1_slope)(kind, input, a, b, c, LUNAI_GET(dy));
    LUNAI_PUT(y, add ? vf_add(LUNAI_GET(y), v) : v);
  }
}

/* ---- sums along a row ---- */
#undef LUNAI_SUM
#undef LUNAI_PRODUCT
#undef LUNAI_EXP
#undef LUNAI_MOMENTS
#undef LUNAI_NORM
#define LUNAI_SUM 0                /* a */
#define LUNAI_PRODUCT 1            /* a b */
#define LUNAI_EXP 2                /* exp(a - shift) */
#define LUNAI_MOMENTS 3            /* d and d^2, where d = a - shift */
#define LUNAI_NORM 4               /* g and g (a - shift) factor, where g = b c, or b when c is null */

/* p += and q += the terms of the vector at i, of which `left` floats exist; the others add 0 */
LUNAI_INLINE void LUNAI_K(term)(int kind, int64_t i, int64_t left, const float *a, const float *b, const float *c,
                                vf shift, vf factor,
                                vf *p, vf *q) {
  if (kind == LUNAI_SUM) *p = vf_add(*p, LUNAI_K(get)(a + i, left));
  if (kind == LUNAI_PRODUCT) *p = vf_fma(LUNAI_K(get)(a + i, left), LUNAI_K(get)(b + i, left), *p);
  if (kind == LUNAI_EXP)
    *p = vf_add(*p, vf_exp(vf_sub(LUNAI_K(get_filled)(a + i, left, vf_set((float)-INFINITY)), shift)));
  if (kind == LUNAI_MOMENTS) {
    const vf d = vf_sub(LUNAI_K(get_filled)(a + i, left, shift), shift);
    *p = vf_add(*p, d);
    *q = vf_fma(d, d, *q);
  }
  if (kind == LUNAI_NORM) {
    vf g = LUNAI_K(get)(b + i, left);
    if (c) g = vf_mul(g, LUNAI_K(get)(c + i, left));
    *p = vf_add(*p, g);
    *q = vf_fma(g, vf_mul(vf_sub(LUNAI_K(get)(a + i, left), shift), factor), *q);
  }
}

/* returns the first sum; *second gets the other of a kind that has two. Four chains of sixteen float terms, then
   double */
LUNAI_INLINE double LUNAI_K(reduce)(int kind, int64_t n, const float *a, const float *b, const float *c, float shift,
                                    float factor,
                                    double *second) {
  const vf s = vf_set(shift), f = vf_set(factor);
  double sum = 0, other = 0;
  int64_t i = 0;
  while (i < n) {
    const int64_t end = lunai_min(n, i + 64 * VF);
    vf p0 = vf_zero(), p1 = p0, p2 = p0, p3 = p0, q0 = p0, q1 = p0, q2 = p0, q3 = p0;
    for (; i + 4 * VF <= end; i += 4 * VF) {
      LUNAI_K(term)(kind, i, VF, a, b, c, s, f, &p0, &q0);
      LUNAI_K(term)(kind, i + VF, VF, a, b, c, s, f, &p1, &q1);
      LUNAI_K(term)(kind, i + 2 * VF, VF, a, b, c, s, f, &p2, &q2);
      LUNAI_K(term)(kind, i + 3 * VF, VF, a, b, c, s, f, &p3, &q3);
    }
    for (; i < end; i += VF) LUNAI_K(term)(kind, i, end - i, a, b, c, s, f, &p0, &q0);
    sum += (double)vf_sum(vf_add(vf_add(p0, p1), vf_add(p2, p3)));
    if (second) other += (double)vf_sum(vf_add(vf_add(q0, q1), vf_add(q2, q3)));
  }
  if (second) *second = other;
  return sum;
}

LUNAI_FN double LUNAI_K(sum)(int64_t n, const float *x) {
  return LUNAI_K(reduce)(LUNAI_SUM, n, x, NULL, NULL, 0, 0, NULL);
}
LUNAI_FN double LUNAI_K(products)(int64_t n, const float *a, const float *b) {
  return LUNAI_K(reduce)(LUNAI_PRODUCT, n, a, b, NULL, 0, 0, NULL);
}
LUNAI_FN double LUNAI_K(sum_squares)(int64_t n, const float *x) { return LUNAI_K(products)(n, x, x); }
LUNAI_FN float LUNAI_K(dot)(int64_t n, const float *a, const float *b) { return (float)LUNAI_K(products)(n, a, b); }

/* ---- softmax: y = exp(x - max) / sum ---- */

/* what to subtract before exp: the largest of x and `largest`, or 0 where that is -Inf. A NaN may be overlooked here:
   the sum of exp is NaN then */
LUNAI_FN float LUNAI_K(softmax_shift)(int64_t n, const float *x, float largest) {
  vf max = vf_set(largest);
  int64_t i;
  for (i = 0; i < n; i += VF) max = vf_max(max, LUNAI_K(get_filled)(x + i, n - i, max));
  largest = vf_hmax(max);
  return largest > (float)-INFINITY ? largest : 0;
}

LUNAI_FN void LUNAI_K(softmax)(int64_t rows, int64_t n, const float *x, float *y) {
  int64_t row, i;
  for (row = 0; row < rows; row++, x += n, y += n) {
    const vf shift = vf_set(LUNAI_K(softmax_shift)(n, x, (float)-INFINITY));
    double sum;
    for (i = 0; i < n; i += VF) LUNAI_PUT(y, vf_exp(vf_sub(LUNAI_GET(x), shift)));
    sum = LUNAI_K(sum)(n, y);
    LUNAI_K(scale)(n, (float)(sum > 0 ? 1 / sum : sum), y, y); /* an empty row is 0, NaN propagates */
  }
}

LUNAI_FN void LUNAI_K(softmax_backward)(int64_t rows, int64_t n, const float *y, const float *dy, float *dx) {
  int64_t row, i;
  for (row = 0; row < rows; row++, y += n, dy += n, dx += n) {
    const vf mean = vf_set(LUNAI_K(dot)(n, y, dy));
    for (i = 0; i < n; i += VF) LUNAI_PUT(dx, vf_fma(LUNAI_GET(y), vf_sub(LUNAI_GET(dy), mean), LUNAI_GET(dx)));
  }
}

/* ---- layer norm: y = (x - mean) rstd weight + bias, rstd = 1 / sqrt(variance + epsilon) ---- */
LUNAI_FN void LUNAI_K(layer_norm)(int64_t rows, int64_t n, const float *x, const float *weight, const float *bias,
                                  float epsilon, float *y,
                                  float *mean, float *rstd) {
  int64_t row, i;
  for (row = 0; row < rows && n > 0; row++, x += n, y += n) {
    /* the second pass also computes the rounding error of the mean */
    const float center = (float)(LUNAI_K(sum)(n, x) / (double)n);
    double squares, off = LUNAI_K(reduce)(LUNAI_MOMENTS, n, x, NULL, NULL, center, 0, &squares) / (double)n;
    const double variance = squares / (double)n - off * off;
    const float r = (float)(1 / sqrt((variance < 0 ? 0 : variance) + (double)epsilon));
    const vf vcenter = vf_set(center), voff = vf_set((float)off), vr = vf_set(r);
    for (i = 0; i < n; i += VF) {
      vf v = vf_mul(vf_sub(vf_sub(LUNAI_GET(x), vcenter), voff), vr);
      if (weight) v = vf_mul(v, LUNAI_GET(weight));
      if (bias) v = vf_add(v, LUNAI_GET(bias));
      LUNAI_PUT(y, v);
    }
    if (mean) mean[row] = (float)((double)center + off);
    if (rstd) rstd[row] = r;
  }
}

/* RMS norm: y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + epsilon); as a layer norm of mean 0 [arXiv 1910.07467] */
LUNAI_FN void LUNAI_K(rms_norm)(int64_t rows, int64_t n, const float *x, const float *weight, float epsilon, float *y,
                                float *mean, float *rstd) {
  int64_t row, i;
  for (row = 0; row < rows && n > 0; row++, x += n, y += n) {
    const float r = (float)(1 / sqrt(LUNAI_K(sum_squares)(n, x) / (double)n + (double)epsilon));
    for (i = 0; i < n; i += VF) {
      const vf v = vf_mul(LUNAI_GET(x), vf_set(r));
      LUNAI_PUT(y, weight ? vf_mul(v, LUNAI_GET(weight)) : v);
    }
    if (mean) mean[row] = 0;
    if (rstd) rstd[row] = r;
  }
}

/* dx = rstd (g - mean(g) - xhat mean(g xhat)) (+ dx), g = dy weight, xhat = (x - mean) rstd; rms: without mean(g) */
LUNAI_FN void LUNAI_K(layer_norm_backward)(bool rms, int64_t rows, int64_t n, const float *x, const float *weight,
                                           const float *mean, const float *rstd, const float *dy, float *dx, bool add) {
  int64_t row, i;
  for (row = 0; row < rows && n > 0; row++, x += n, dy += n, dx += n) {
    double moment, sum = LUNAI_K(reduce)(LUNAI_NORM, n, x, dy, weight, mean[row], rstd[row], &moment);
    const vf center = vf_set(mean[row]), r = vf_set(rstd[row]);
    const vf mean_g = vf_set(rms ? 0 : (float)(sum / (double)n)), mean_moment = vf_set((float)(moment / (double)n));
    for (i = 0; i < n; i += VF) {
      const vf xhat = vf_mul(vf_sub(LUNAI_GET(x), center), r);
      vf g = LUNAI_GET(dy);
      if (weight) g = vf_mul(g, LUNAI_GET(weight));
      LUNAI_PUT(dx, vf_fma(r, vf_fnma(xhat, mean_moment, vf_sub(g, mean_g)), add ? LUNAI_GET(dx) : vf_zero()));
    }
  }
}

/* ---- sums along columns, over rows in order ---- */
#undef LUNAI_SUM_COLUMNS
#undef LUNAI_COLUMN
#define LUNAI_SUM_COLUMNS (4 * VF) /* columns at a time, in registers */
#define LUNAI_COLUMN(i) \
  if (vectors > i) \
    sum##i = b ? vf_fma(LUNAI_K(get)(a + i * VF, left - i * VF), \
                        vf_mul(vf_sub(LUNAI_K(get)(b + i * VF, left - i * VF), center), scale), sum##i) \
                              : vf_add(sum##i, LUNAI_K(get)(a + i * VF, left - i * VF));
/* part = the sums of up to LUNAI_FLOAT_ROWS rows, of which `left` columns exist */
LUNAI_INLINE void LUNAI_K(column_part)(int vectors, int64_t rows, int64_t left, const float *a, int64_t a_row,
                                       const float *b, int64_t b_row,
                                       const float *mean, const float *rstd, float *part) {
  vf sum0 = vf_zero(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t r;
  for (r = 0; r < rows; r++, a += a_row) {
    const vf center = mean ? vf_set(mean[r]) : vf_zero(), scale = rstd ? vf_set(rstd[r]) : vf_set(1);
    LUNAI_COLUMN(0) LUNAI_COLUMN(1) LUNAI_COLUMN(2) LUNAI_COLUMN(3)
    if (b) b += b_row;
  }
  vf_store(part, sum0);
  vf_store(part + VF, sum1);
  vf_store(part + 2 * VF, sum2);
  vf_store(part + 3 * VF, sum3);
}

/* y[j y_column] += factor * sum over rows of a (b - mean) rstd; null b: of a; null mean and rstd: of a b */
LUNAI_FN void LUNAI_K(column_sums)(int64_t rows, int64_t columns, const float *a, int64_t a_row, const float *b,
                                   int64_t b_row,
                                   const float *mean, const float *rstd, float factor, float *y, int64_t y_column) {
  float part[LUNAI_SUM_COLUMNS];
  double total[LUNAI_SUM_COLUMNS];
  int64_t first, n, r, i;
  for (first = 0; first < columns; first += n) {
    n = columns - first >= LUNAI_SUM_COLUMNS ? LUNAI_SUM_COLUMNS : lunai_min(columns - first, VF);
    for (i = 0; i < n; i++) total[i] = 0;
    for (r = 0; r < rows; r += LUNAI_FLOAT_ROWS) {
      const float *a_at = a + r * a_row + first, *b_at = b ? b + r * b_row + first : NULL,
          *means = mean ? mean + r : NULL, *rstds = rstd ? rstd + r : NULL;
      const int64_t count = lunai_min(rows - r, LUNAI_FLOAT_ROWS);
      if (n < LUNAI_SUM_COLUMNS) LUNAI_K(column_part)(1, count, n, a_at, a_row, b_at, b_row, means, rstds, part);
      else if (b) LUNAI_K(column_part)(4, count, LUNAI_SUM_COLUMNS, a_at, a_row, b_at, b_row, means, rstds, part);
      else LUNAI_K(column_part)(4, count, LUNAI_SUM_COLUMNS, a_at, a_row, NULL, 0, NULL, NULL, part);
      for (i = 0; i < n; i++) total[i] += (double)part[i];
    }
    for (i = 0; i < n; i++) y[(first + i) * y_column] += (float)((double)factor * total[i]);
  }
}

LUNAI_FN void LUNAI_K(layer_norm_weights)(int64_t rows, int64_t n, int64_t first, int64_t last, const float *x,
                                          const float *mean,
                                          const float *rstd, const float *dy, float *dweight, float *dbias) {
  if (dweight) LUNAI_K(column_sums)(rows, last - first, dy + first, n, x + first, n, mean, rstd, 1, dweight + first, 1);
  if (dbias) LUNAI_K(column_sums)(rows, last - first, dy + first, n, NULL, 0, NULL, NULL, 1, dbias + first, 1);
}

LUNAI_FN void LUNAI_K(sum_rows)(int64_t rows, int64_t n, int64_t row_stride, int64_t first, int64_t last, float factor,
                                const float *x,
                                float *y) {
  last = lunai_min(last, n);
  LUNAI_K(column_sums)(rows, last - first, x + first, row_stride, NULL, 0, NULL, NULL, factor, y + first, 1);
}

/* ---- cross-entropy: loss = -sum_j target_j log softmax(logits)_j, target = (1 - smoothing) onehot + smoothing / n
   ---- */
/* sum of exp(x - shift) */
LUNAI_FN double LUNAI_K(sum_exp)(int64_t n, const float *x, float shift) {
  return LUNAI_K(reduce)(LUNAI_EXP, n, x, NULL, NULL, shift, 0, NULL);
}
LUNAI_FN void LUNAI_K(cross_entropy_backward)(const lunai_cross_entropy *a) {
  const vf f = vf_set(a->factor), base = vf_set(a->smoothing / (float)a->classes);
  const int64_t n = a->columns;
  int64_t row, i;
  for (row = 0; row < a->rows; row++) {
    const float *logits = a->logits + row * a->logits_row, *next = row + 1 < a->rows ? logits + a->logits_row : logits;
    float *grad = a->grad + row * a->grad_row;
    const int64_t label = a->labels[row] - a->first;
    const vf total = vf_set(a->lse[row]);
    if (a->labels[row] < 0) {
      if (!a->add) memset(grad, 0, (size_t)n * sizeof(float));
      continue;
    }
    for (i = 0; i < n; i += VF) {
      LUNAI_PREFETCH(next + i);
      LUNAI_PUT(grad, vf_fma(f, vf_sub(vf_exp(vf_sub(LUNAI_GET(logits), total)), base),
                             a->add ? LUNAI_GET(grad) : vf_zero()));
    }
    if (label >= 0 && label < n) grad[label] -= a->factor * (1 - a->smoothing);
  }
}

/* ---- short convolution over time, each channel alone: y_t = bias + sum_i weight_i x_(t - width + 1 + i) ---- */
#undef LUNAI_TAPS
#undef LUNAI_TAP_COLUMNS
#define LUNAI_TAPS 8               /* taps and channels transposed at a time: what fits the stack */
#define LUNAI_TAP_COLUMNS 64

/* y_t = start + sum_i weight_i x_(t - width + 1 + i), or backward: y_t = y_t + sum_i weight_i x_(t + width - 1 - i).
   A row that does not exist has no term: in both directions that is a lower bound on i */
LUNAI_INLINE void LUNAI_K(convolve)(bool backward, int64_t rows, int64_t channels, int64_t width, const float *x,
                                    const float *history,
                                    const float *weight, const float *bias, float *y) {
  float taps[LUNAI_TAPS * LUNAI_TAP_COLUMNS];
  const float *from[LUNAI_TAPS];
  int64_t first, base, t, i, k;
  for (first = 0; first < channels; first += LUNAI_TAP_COLUMNS) {
    const int64_t n = lunai_min(channels - first, LUNAI_TAP_COLUMNS);
    for (base = 0; base < width; base += LUNAI_TAPS) {
      const int64_t count = lunai_min(width - base, LUNAI_TAPS);
      for (k = 0; k < count; k++)
        for (i = 0; i < n; i++) taps[k * LUNAI_TAP_COLUMNS + i] = weight[(first + i) * width + base + k];
      for (t = 0; t < rows; t++) {
        const int64_t low = lunai_max(0, (backward ? t + width - rows : history ? 0 : width - 1 - t) - base);
        float *y_at = y + t * channels + first;
        for (k = low; k < count; k++) {
          const int64_t row = backward ? t + width - 1 - base - k : t - width + 1 + base + k;
          from[k] = (row < 0 ? history + (row + width - 1) * channels : x + row * channels) + first;
        }
        for (i = 0; i < n; i += VF) {
          vf sum = backward || base > 0 ? LUNAI_GET(y_at) : bias ? LUNAI_GET(bias + first) : vf_zero();
          for (k = low; k < count; k++) sum = vf_fma(LUNAI_GET(taps + k * LUNAI_TAP_COLUMNS), LUNAI_GET(from[k]), sum);
          LUNAI_PUT(y_at, sum);
        }
      }
    }
  }
}

LUNAI_FN void LUNAI_K(short_convolution)(int64_t rows, int64_t n, int64_t width, const float *x, const float *history,
                                         const float *weight,
                                         const float *bias, float *y) {
  LUNAI_K(convolve)(false, rows, n, width, x, history, weight, bias, y);
}

LUNAI_FN void LUNAI_K(short_convolution_backward)(int64_t rows, int64_t n, int64_t width, const float *weight,
                                                  const float *dy, float *dx) {
  LUNAI_K(convolve)(true, rows, n, width, dy, NULL, weight, NULL, dx);
}

LUNAI_FN void LUNAI_K(short_convolution_weights)(int64_t rows, int64_t n, int64_t width, int64_t first, int64_t last,
                                                 const float *x,
                                                 const float *dy, float *dweight, float *dbias) {
  int64_t i;
  for (i = 0; dweight && i < width; i++) {
    const int64_t skip = lunai_min(rows, width - 1 - i); /* the first rows have no such term */
    LUNAI_K(column_sums)(rows - skip, last - first, dy + skip * n + first, n, x + first, n, NULL, NULL, 1,
                         dweight + first * width + i,
                         width);
  }
  if (dbias) LUNAI_K(column_sums)(rows, last - first, dy + first, n, NULL, 0, NULL, NULL, 1, dbias + first, 1);
}

/* ---- dropout ---- */

/* Philox in 64-bit lanes, of which the lower halves count: that is how x86 multiplies. vu_join(a, b): words a and b
   side by side. VU_ORDER: which counter of VU a lane holds, so that the even lanes' results (vu_even), then the odd
   ones', lie in order */
#undef VU
#undef VU_ORDER
#undef vu
#undef vu_load
#undef vu_store
#undef vu_set
#undef vu_add
#undef vu_xor
#undef vu_mul
#undef vu_high
#undef vu_up
#undef vu_join
#undef vu_even
#undef vu_odd
#undef LUNAI_OP
#undef LUNAI_SI
#if LUNAI_PASS == LUNAI_ISA_SSE2
#define VU 2
#define VU_ORDER {0, 1}
#define vu __m128i
#define vu_set(x) _mm_set1_epi64x((long long)(x))
#define LUNAI_OP(name, a, b) LUNAI_JOIN(_mm_, name)(a, b)
#define LUNAI_SI(name) LUNAI_JOIN(LUNAI_JOIN(_mm_, name), _si128)
#elif LUNAI_PASS == LUNAI_ISA_AVX2
#define VU 4
#define VU_ORDER {0, 2, 1, 3}
#define vu __m256i
#define vu_set(x) _mm256_set1_epi64x((long long)(x))
#define LUNAI_OP(name, a, b) LUNAI_JOIN(_mm256_, name)(a, b)
#define LUNAI_SI(name) LUNAI_JOIN(LUNAI_JOIN(_mm256_, name), _si256)
#elif LUNAI_PASS == LUNAI_ISA_AVX512
#define VU 8
#define VU_ORDER {0, 4, 1, 5, 2, 6, 3, 7}
#define vu __m512i
#define vu_set(x) _mm512_set1_epi64((long long)(x))
#define LUNAI_OP(name, a, b) LUNAI_JOIN(_mm512_maskz_, name)(0xFF, a, b) /* the unmasked forms make g++ 12 warn */
#define LUNAI_SI(name) LUNAI_JOIN(LUNAI_JOIN(_mm512_, name), _si512)
#else
#define VU 1
#define VU_ORDER {0}
#define vu uint64_t
#define vu_set(x) ((uint64_t)(x))
#define vu_load(p) (*(p))
#define vu_store(p, v) \
  ((p)[0] = (uint16_t)(v), (p)[1] = (uint16_t)((v) >> 16), (p)[2] = (uint16_t)((v) >> 32), \
   (p)[3] = (uint16_t)((v) >> 48))
#define vu_add(a, b) ((a) + (b))
#define vu_xor(a, b) ((a) ^ (b))
#define vu_mul(a, b) ((uint64_t)(uint32_t)(a) * (uint32_t)(b))
#define vu_high(a) ((a) >> 32)
#define vu_up(a) ((a) << 32)
#define vu_even(a, b) (a)
#define vu_odd(a, b) (b)
#endif
#ifdef LUNAI_OP
#define vu_load(p) LUNAI_SI(loadu)((const vu *)(const void *)(p))
#define vu_store(p, v) LUNAI_SI(storeu)((vu *)(void *)(p), v)
#define vu_add(a, b) LUNAI_OP(add_epi64, a, b)
#define vu_xor(a, b) LUNAI_SI(xor)(a, b)
#define vu_mul(a, b) LUNAI_OP(mul_epu32, a, b)
#define vu_high(a) LUNAI_OP(srli_epi64, a, 32)
#define vu_up(a) LUNAI_OP(slli_epi64, a, 32)
#define vu_even(a, b) LUNAI_OP(unpacklo_epi64, a, b)
#define vu_odd(a, b) LUNAI_OP(unpackhi_epi64, a, b)
#endif
#define vu_join(a, b) vu_xor(vu_high(vu_up(a)), vu_up(b))

/* lunai_philox for counters [at, at + 8): mask gets keep or 0 for each of their 64 elements */
LUNAI_FN void LUNAI_K(dropout_block)(const lunai_dropout *d, uint64_t at, float *mask) {
  static const uint64_t order[VU] = VU_ORDER;
  uint16_t half[64];
  const int32_t threshold = (int32_t)d->threshold;
  const float keep = d->keep;
  int round, i;
  for (i = 0; i < 8; i += VU) {
    vu c0 = vu_add(vu_set(at + (uint64_t)i), vu_load(order)), c1 = vu_high(c0), c2 = vu_set(d->op),
        c3 = vu_set(d->step);
    vu k0 = vu_set(d->seed), k1 = vu_set(d->seed >> 32);
    for (round = 0; round < 10; round++) {
      const vu p = vu_mul(c0, vu_set(0xD2511F53u)), r = vu_mul(c2, vu_set(0xCD9E8D57u));
      c0 = vu_xor(vu_xor(vu_high(r), c1), k0);
      c1 = r;
      c2 = vu_xor(vu_xor(vu_high(p), c3), k1);
      c3 = p;
      k0 = vu_add(k0, vu_set(0x9E3779B9u));
      k1 = vu_add(k1, vu_set(0xBB67AE85u));
    }
    c0 = vu_join(c0, c1);
    c2 = vu_join(c2, c3);
    vu_store(half + 8 * i, vu_even(c0, c2));
    vu_store(half + 8 * i + 4 * VU, vu_odd(c0, c2));
  }
  for (i = 0; i < 64; i++) mask[i] = half[i] < threshold ? 0 : keep;
}

/* mask[i] = keep or 0 for element first + i */
LUNAI_FN void LUNAI_K(dropout_mask)(const lunai_dropout *d, int64_t first, int64_t n, float *mask) {
  float block[64];
  while (n > 0) {
    const int64_t skip = first % 8, count = lunai_min(n, 64 - skip);
    const bool whole = count == 64;
    LUNAI_K(dropout_block)(d, (uint64_t)first / 8, whole ? mask : block);
    if (!whole) memcpy(mask, block + skip, (size_t)count * sizeof(float));
    first += count;
    mask += count;
    n -= count;
  }
}

LUNAI_FN void LUNAI_K(dropout)(const lunai_dropout *dropout, int64_t first, int64_t n, const float *x, float *y,
                               bool accumulate) {
  float mask[512];
  int64_t at, i;
  for (at = 0; at < n; at += 512) {
    const int64_t count = lunai_min(n - at, 512);
    LUNAI_K(dropout_mask)(dropout, first + at, count, mask);
    for (i = 0; i < count; i += VF) {
      const vf m = LUNAI_K(get)(mask + i, count - i), v = vf_mul(LUNAI_K(get)(x + at + i, count - i), m);
      const vf kept = vf_select(vf_gt(m, vf_zero()), v, vf_zero()); /* a dropped NaN is 0 */
      LUNAI_K(put)(y + at + i, accumulate ? vf_add(LUNAI_K(get)(y + at + i, count - i), kept) : kept, count - i);
    }
  }
}

/* ---- optimisers: consume the gradient and clear it ---- */
LUNAI_FN void LUNAI_K(sgd)(const lunai_update *update) {
  const int64_t n = update->count;
  const vf lr = vf_set(update->lr), decay = vf_set(update->decay), momentum = vf_set(update->momentum),
      factor = vf_set(update->factor);
  const bool moving = update->momentum != 0, nesterov = update->nesterov;
  float *value = update->value, *grad = update->grad, *first = update->moment[0];
  int64_t i;
  for (i = 0; i < n; i += VF) {
    const vf v = LUNAI_GET(value);
    vf g = vf_fma(LUNAI_GET(grad), factor, vf_mul(decay, v));
    if (moving) {
      const vf m = vf_fma(momentum, LUNAI_GET(first), g);
      LUNAI_PUT(first, m);
      g = nesterov ? vf_fma(momentum, m, g) : m;
    }
    LUNAI_PUT(value, vf_fnma(lr, g, v));
    LUNAI_PUT(grad, vf_zero());
  }
}

LUNAI_FN void LUNAI_K(adam)(const lunai_update *update) {
  const int64_t n = update->count;
  const vf beta1 = vf_set(update->beta1), rest1 = vf_set(1 - update->beta1);
  const vf beta2 = vf_set(update->beta2), rest2 = vf_set(1 - update->beta2);
  const vf coupled = vf_set(update->coupled ? update->decay : 0),
      decay = vf_set(update->coupled ? 0 : update->lr * update->decay);
  const vf factor = vf_set(update->factor), epsilon = vf_set(update->epsilon);
  const vf step = vf_set((float)((double)update->lr / (double)update->correction1));
  const vf root = vf_set((float)(1 / sqrt((double)update->correction2)));
  float *value = update->value, *grad = update->grad, *first = update->moment[0], *second = update->moment[1];
  int64_t i;
  for (i = 0; i < n; i += VF) {
    const vf v = LUNAI_GET(value), g = vf_fma(LUNAI_GET(grad), factor, vf_mul(coupled, v));
    const vf m = vf_fma(beta1, LUNAI_GET(first), vf_mul(rest1, g));
    const vf s = vf_fma(beta2, LUNAI_GET(second), vf_mul(rest2, vf_mul(g, g)));
    const vf move = vf_div(vf_mul(step, m), vf_fma(vf_sqrt(s), root, epsilon));
    LUNAI_PUT(first, m);
    LUNAI_PUT(second, s);
    LUNAI_PUT(value, vf_sub(vf_fnma(decay, v, v), move));
    LUNAI_PUT(grad, vf_zero());
  }
}
/* Apollo (arXiv 2009.13586, algorithm 1), m, B and d the three moments: sums over a part of a parameter of d^4, (g - m)
   d and B d^2 */
LUNAI_FN void LUNAI_K(apollo_sums)(const lunai_update *update, double sums[3]) {
  const vf factor = vf_set(update->factor), decay = vf_set(update->decay);
  const float *value = update->value, *grad = update->grad, *mean = update->moment[0], *curve = update->moment[1],
      *last = update->moment[2];
  int64_t first, i;
  sums[0] = sums[1] = sums[2] = 0;
  for (first = 0; first < update->count; first += 1024) {
    const int64_t n = lunai_min(first + 1024, update->count);
    vf fourth = vf_zero(), along = vf_zero(), bent = vf_zero();
    for (i = first; i < n; i += VF) {
      const vf d = LUNAI_GET(last), square = vf_mul(d, d);
      const vf g = vf_fma(LUNAI_GET(grad), factor, vf_mul(decay, LUNAI_GET(value)));
      fourth = vf_fma(square, square, fourth);
      along = vf_fma(vf_sub(g, LUNAI_GET(mean)), d, along);
      bent = vf_fma(LUNAI_GET(curve), square, bent);
    }
    sums[0] += (double)vf_sum(fourth);
    sums[1] += (double)vf_sum(along);
    sums[2] += (double)vf_sum(bent);
  }
}
/* m += alpha (g - m), B += curvature d^2, d = m / max(|B|, 1), value -= lr d */
LUNAI_FN void LUNAI_K(apollo)(const lunai_update *update) {
  const int64_t n = update->count;
  const vf factor = vf_set(update->factor), decay = vf_set(update->decay), lr = vf_set(update->lr);
  const vf alpha = vf_set(update->alpha), curvature = vf_set(update->curvature), one = vf_set((float)1);
  float *value = update->value, *grad = update->grad, *mean = update->moment[0], *curve = update->moment[1],
      *last = update->moment[2];
  int64_t i;
  for (i = 0; i < n; i += VF) {
    const vf v = LUNAI_GET(value), g = vf_fma(LUNAI_GET(grad), factor, vf_mul(decay, v)), before = LUNAI_GET(mean),
        d = LUNAI_GET(last);
    const vf m = vf_fma(alpha, vf_sub(g, before), before), b = vf_fma(curvature, vf_mul(d, d), LUNAI_GET(curve));
    const vf next = vf_div(m, vf_max(vf_abs(b), one));
    LUNAI_PUT(mean, m);
    LUNAI_PUT(curve, b);
    LUNAI_PUT(last, next);
    LUNAI_PUT(value, vf_fnma(lr, next, v));
    LUNAI_PUT(grad, vf_zero());
  }
}
#undef LUNAI_GET
#undef LUNAI_PUT

#elif !defined(LUNAI_PASS)

/* ---- cross-entropy, driver ---- */
LUNAI_FN void lunai_cross_entropy_row(const lunai_kernels *kernels, const lunai_cross_entropy *a, int64_t row) {
  const float *logits = a->logits + row * a->logits_row;
  const int64_t label = a->labels[row] - a->first;
  const bool last = a->first + a->columns == a->classes;
  lunai_row_sums own, *s = a->sums ? a->sums + row : &own;
  float shift;
  if (a->first == 0) {
    s->exps = s->logits = 0;
    s->shift = (float)-INFINITY;
    s->label = 0;
  }
  shift = kernels->softmax_shift(a->columns, logits, s->shift);
  if (s->exps != 0 && shift > s->shift) s->exps *= kernels->sum_exp(1, &s->shift, shift);
  s->exps += kernels->sum_exp(a->columns, logits, shift);
  if (shift != 0 || s->exps != 0) s->shift = shift;
  if (a->smoothing > 0) s->logits += kernels->sum(a->columns, logits);
  if (label >= 0 && label < a->columns) s->label = logits[label];
  if (last) {
    const double log_sum = s->exps > 0 ? (double)lunai_log1_scalar((float)s->exps) : s->exps == 0 ? -(double)INFINITY :
                 s->exps;
    const double off = (double)shift - (double)s->label;
    double result = log_sum + off;
    if (a->smoothing > 0) result += (double)a->smoothing * ((double)s->label - s->logits / (double)a->classes);
    if (a->lse) a->lse[row] = (float)((double)shift + log_sum);
    a->loss[row] = (float)result;
  }
}
LUNAI_FN void lunai_run_cross_entropy(const lunai_kernels *kernels, const lunai_cross_entropy *a) {
  int64_t row;
  for (row = 0; row < a->rows; row++)
    if (a->labels[row] >= 0) lunai_cross_entropy_row(kernels, a, row);
    else {
      a->loss[row] = 0;
      if (a->lse) a->lse[row] = 0;
    }
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>attention: out = softmax(scale Q K^T) V for every head (eq. 1), and the folded unpack (eq. 4), forward and backward
   Tiles of 64 queries by blocks of 512 keys; no more than one tile of scores is ever held. A block gives a partial
   result (maximum, sum, values); partials merge in block order, at once where a thread has all blocks of a tile, later
   where the blocks went to several threads: the same arithmetic, so the same bits. Backward recomputes P from each
   row's log-sum-exp. Guarded by tests/attention.c
   ------------------------------------------------------------------------------------------------------------------ */
#ifndef LUNAI_PASS
/* The reference. Offsets of row i of batch row b and head h, and how many keys it sees */
typedef struct lunai_attention_row { int64_t q, k, v, out, stat, keys, element; } lunai_attention_row;
LUNAI_FN bool lunai_attention_row_at(const lunai_attention *a, int64_t b, int64_t h, int64_t i,
                                     lunai_attention_row *r) {
  const int64_t first = a->query_offsets ? a->query_offsets[b] : b * a->queries;
  const int64_t rows = a->query_offsets ? a->query_offsets[b + 1] - first : a->queries;
  const int64_t key = a->key_offsets ? a->key_offsets[b] : 0;
  if (i >= rows) return false;
  r->q = (a->query_offsets ? first * a->q_row : b * a->q_batch) + i * a->q_row + h * a->q_head;
  r->out = (a->query_offsets ? first * a->out_row : b * a->out_batch) + i * a->out_row + h * a->out_head;
  r->k = (a->key_offsets ? key * a->k_row : b * a->k_batch) + h * a->k_head;
  r->v = (a->key_offsets ? key * a->v_row : b * a->v_batch) + h * a->v_head;
  r->keys = a->key_offsets ? a->key_offsets[b + 1] - key : a->keys;
  if (a->lengths) r->keys = lunai_min(r->keys, lunai_max(a->lengths[b], 0));
  if (a->causal) r->keys = lunai_min(r->keys, i + 1);
  r->stat = (first + i) * a->heads + h;
  r->element = ((b * a->heads + h) * a->queries + i) * a->keys;
  return true;
}
LUNAI_FN double lunai_attention_score(const lunai_attention *a, const lunai_attention_row *r, int64_t j) {
  return (double)a->scale * lunai_inner(a->head_dim, a->q + r->q, 1, a->k + r->k + j * a->k_row, 1);
}

/* out = sum_j p_j v_j, p = softmax(scale q K^T) [eq. 1]; columns of V by sixty-fours, whose sums are kept in double */
LUNAI_FN void lunai_attention_row_reference(const lunai_attention *a, const lunai_attention_row *r) {
  double max = -(double)INFINITY, total = 0, kept = 0;
  int64_t j, e, first;
  for (j = 0; j < r->keys; j++) {
    const double score = lunai_attention_score(a, r, j);
    if (!(score <= max)) max = score;
  }
  for (first = 0; first == 0 || first < a->value_dim; first += 64) {
    const int64_t n = lunai_min(64, a->value_dim - first);
    double sum[64] = {0};
    total = kept = 0;
    for (j = 0; j < r->keys; j++) {
      const double p = (double)lunai_exp1_scalar((float)(lunai_attention_score(a, r, j) - max));
      const double masked = p * (double)lunai_dropout_at(&a->dropout, r->element + j);
      total += p;
      kept += masked;
      for (e = 0; e < n; e++) sum[e] += masked * (double)a->v[r->v + j * a->v_row + first + e];
    }
    for (e = 0; e < n; e++) a->out[r->out + first + e] = r->keys > 0 ? (float)(sum[e] / total) : 0;
  }
  if (a->lse) a->lse[r->stat] = r->keys > 0 ? (float)(max + (double)lunai_log1_scalar((float)total)) : 0;
  if (a->sums) a->sums[r->stat] = r->keys > 0 ? (float)(kept / total) : 0;
}
LUNAI_FN void lunai_dense_reference(const lunai_attention *a) {
  lunai_attention_row r;
  int64_t b, h, i;
  for (b = 0; b < a->batch; b++)
    for (h = 0; h < a->heads; h++)
      for (i = 0; lunai_attention_row_at(a, b, h, i, &r); i++) lunai_attention_row_reference(a, &r);
}

/* y += factor x */
LUNAI_FN void lunai_add_scaled(int64_t n, double factor, const float *x, float *y) {
  int64_t i;
  for (i = 0; y && i < n; i++) y[i] += (float)(factor * (double)x[i]);
}
/* dP = m (dO . v + dsum), dS = P (dP - sum of P dP), where sum of P dP = dO . O + dsum sum */
LUNAI_FN void lunai_dense_backward_reference(const lunai_attention *a) {
  lunai_attention_row r;
  int64_t b, h, i, j;
  for (b = 0; b < a->batch; b++)
    for (h = 0; h < a->heads; h++)
      for (i = 0; lunai_attention_row_at(a, b, h, i, &r); i++) {
        const float *g = a->grad_out + r.out;
        const double extra = a->grad_sums && a->dropout.threshold ? (double)a->grad_sums[r.stat] : 0;
        const double mean = lunai_inner(a->value_dim, g, 1, a->out + r.out, 1) +
                     (extra != 0 ? extra * (double)a->sums[r.stat] : 0);
        for (j = 0; j < r.keys; j++) {
          const int64_t k = r.k + j * a->k_row, v = r.v + j * a->v_row;
          const double p = (double)lunai_exp1_scalar((float)(lunai_attention_score(a, &r, j) - (double)a->lse[r.stat]));
          const double mask = (double)lunai_dropout_at(&a->dropout, r.element + j);
          const double dp = mask * (lunai_inner(a->value_dim, g, 1, a->v + v, 1) + extra);
          const double ds = (double)a->scale * p * (dp - mean);
          if (a->grad_q) lunai_add_scaled(a->head_dim, ds, a->k + k, a->grad_q + r.q);
          if (a->grad_k) lunai_add_scaled(a->head_dim, ds, a->q + r.q, a->grad_k + k);
          if (a->grad_v) lunai_add_scaled(a->value_dim, p * mask, g, a->grad_v + v);
        }
      }
}
#endif

#ifdef LUNAI_PASS_LOOPS
/* sums n floats to a vector, halving */
LUNAI_INLINE vf LUNAI_K(fold)(float *x, int64_t n) {
  int64_t i, half;
  for (half = n / 2; half >= VF; half /= 2)
    for (i = 0; i < half; i += VF) vf_store(x + i, vf_add(vf_load(x + i), vf_load(x + i + half)));
  return vf_load(x);
}

/* x = exp(x - top), times the mask; added to the sums before and after it */
LUNAI_INLINE void LUNAI_K(softmax_step)(float *x, vf top, const float *mask, float *sum, float *kept) {
  vf p = vf_exp(vf_sub(vf_load(x), top));
  vf_store(sum, vf_add(vf_load(sum), p));
  if (mask) {
    p = vf_mul(p, vf_load(mask));
    vf_store(kept, vf_add(vf_load(kept), p));
  }
  vf_store(x, p);
}

/* The scores become exp(s - maximum), times the mask. stats: each query's maximum, sum before the mask, sum after it.
   The sums go by 16 classes of keys and then by halves, as vf_sum does, so that both layouts give the same bits. */
LUNAI_INLINE void LUNAI_K(softmax_across)(int64_t lines, int64_t length, int64_t step, float *s, const float *mask,
                                          float *stats) {
  int64_t i, j, l;
  for (i = 0; i < lines; i++, s += step) {
    float sum[16] = {0}, kept[16] = {0};
    vf top = vf_set(-INFINITY);
    for (j = 0; j < length; j += VF) top = vf_max(top, vf_load(s + j));
    stats[i] = vf_hmax(top);
    top = vf_set(stats[i]);
    for (j = 0; j < length; j += 16)
      for (l = 0; l < 16; l += VF)
        LUNAI_K(softmax_step)(s + j + l, top, mask ? mask + i * step + j + l : NULL, sum + l, kept + l);
    stats[LUNAI_TILE + i] = vf_sum(LUNAI_K(fold)(sum, 16));
    stats[2 * LUNAI_TILE + i] = vf_sum(LUNAI_K(fold)(kept, 16));
  }
}

LUNAI_INLINE void LUNAI_K(softmax_down)(int64_t lines, int64_t length, int64_t step, float *s, const float *mask,
                                        float *stats) {
  int64_t i, j;
  for (i = 0; i < length; i += VF) {
    float sum[16 * VF] = {0}, kept[16 * VF] = {0};
    vf top = vf_set(-INFINITY);
    for (j = 0; j < lines; j++) top = vf_max(top, vf_load(s + j * step + i));
    for (j = 0; j < lines; j++)
      LUNAI_K(softmax_step)(s + j * step + i, top, mask ? mask + j * step + i : NULL, sum + j % 16 * VF,
                            kept + j % 16 * VF);
    vf_store(stats + i, top);
    vf_store(stats + LUNAI_TILE + i, LUNAI_K(fold)(sum, 16 * VF));
    vf_store(stats + 2 * LUNAI_TILE + i, LUNAI_K(fold)(kept, 16 * VF));
  }
}

LUNAI_FN void LUNAI_K(tile_softmax)(bool across, int64_t lines, int64_t length, int64_t step, float *s,
                                    const float *mask, float *stats) {
  if (across) LUNAI_K(softmax_across)(lines, length, step, s, mask, stats);
  else LUNAI_K(softmax_down)(lines, length, step, s, mask, stats);
}

/* of line j of x the elements before `from` + j, and from `to` + j on, become `value` */
LUNAI_FN void LUNAI_K(tile_hide)(int64_t lines, int64_t length, int64_t step, int64_t from, int64_t to, float value,
                                 float *x) {
  static const float lane[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
  int64_t i, j;
  for (j = 0; j < lines; j++, x += step)
    for (i = 0; i < length; i += VF) {
      const vf at = vf_load(lane), low = vf_set((float)(from + j - i)), high = vf_set((float)(to + j - i));
      const vf kept = vf_select(vf_lt(at, high), vf_load(x + i), vf_set(value));
      vf_store(x + i, vf_select(vf_lt(at, low), vf_set(value), kept));
    }
}

/* y = x with 0 for NaN and Inf; returns whether there were any. A weight of 0 then masks them, where 0 * NaN would
   be NaN. */
LUNAI_FN bool LUNAI_K(finite_copy)(int64_t rows, int64_t n, const float *x, int64_t x_row, float *y) {
  const vf max = vf_set(INFINITY);
  vf nonfinite = vf_zero();
  int64_t i, j;
  for (i = 0; i < rows; i++)
    for (j = 0; j < n; j += VF) {
      const vf v = LUNAI_K(get)(x + i * x_row + j, n - j);
      const vm finite = vf_lt(vf_abs(v), max);
      LUNAI_K(put)(y + i * n + j, vf_select(finite, v, vf_zero()), n - j);
      nonfinite = vf_select(finite, nonfinite, vf_set(1));
    }
  return vf_hmax(nonfinite) > 0;
}

/* merges a block's partial result into that of the blocks before it */
LUNAI_FN void LUNAI_K(attention_merge)(int64_t width, int64_t dim, const float *stats, const float *part, float *state,
                                       float *out,
                                       int64_t out_row) {
  int64_t i, j;
  for (i = 0; i < width; i++) {
    const float top = state[i] > stats[i] ? state[i] : stats[i];
    const float old = LUNAI_K(exp1)(state[i] - top), add = LUNAI_K(exp1)(stats[i] - top);
    float *row = out + i * out_row;
    state[i] = top;
    for (j = 1; j < 3; j++)
      state[j * LUNAI_TILE + i] = state[j * LUNAI_TILE + i] * old + stats[j * LUNAI_TILE + i] * add;
    for (j = 0; j < dim; j += VF) {
      const vf x = vf_mul(LUNAI_K(get)(row + j, dim - j), vf_set(old));
      LUNAI_K(put)(row + j, vf_fma(LUNAI_K(get)(part + i * dim + j, dim - j), vf_set(add), x), dim - j);
    }
  }
}

/* divides the rows by their sums. state: the sums after the mask are divided too, the maxima become log-sum-exps */
LUNAI_FN void LUNAI_K(attention_finish)(int64_t width, int64_t dim, float *state, float *out, int64_t out_row) {
  int64_t i, j;
  for (i = 0; i < width; i++, out += out_row) {
    const float sum = state[LUNAI_TILE + i], factor = 1 / sum;
    for (j = 0; j < dim; j += VF)
      LUNAI_K(put)(out + j, vf_mul(LUNAI_K(get)(out + j, dim - j), vf_set(factor)), dim - j);
    state[i] += LUNAI_K(log1)(sum);
    state[2 * LUNAI_TILE + i] *= factor;
  }
}

/* s: scores become P m; slopes: dP becomes dS = P (dP m - delta), without the scale */
LUNAI_FN void LUNAI_K(tile_slopes)(bool across, int64_t lines, int64_t length, int64_t step, float *s, float *slopes,
                                   const float *mask, const float *lse, const float *delta, const float *add) {
  int64_t i, j;
  for (i = 0; i < lines; i++)
    for (j = 0; j < length; j += VF) {
      const int64_t at = i * step + j;
      const vf p = vf_exp(vf_sub(vf_load(s + at), across ? vf_set(lse[i]) : vf_load(lse + j)));
      const vf shift = across ? vf_set(delta[i]) : vf_load(delta + j);
      vf g = vf_load(slopes + at), kept = p;
      if (mask) {
        const vf m = vf_load(mask + at);
        g = vf_mul(vf_add(g, across ? vf_set(add[i]) : vf_load(add + j)), m);
        kept = vf_mul(p, m);
      }
      vf_store(s + at, kept);
      vf_store(slopes + at, vf_mul(p, vf_sub(g, shift)));
    }
}

#elif !defined(LUNAI_PASS)

#define LUNAI_TILE 64              /* queries of a tile; LUNAI_KEY_BLOCK is a multiple */
#define LUNAI_RUN 256              /* queries of one item of the forward work, at most */
#define LUNAI_FEW_KEYS 128         /* so few are copied into panels, and the queries read in place */

/* One head of one batch row: its real sizes, and where it starts in each tensor. `across`: the scores of a query are
   contiguous, the keys are in panels and the queries read in place; otherwise the scores of a key, and the converse.
   Same bits. */
typedef struct lunai_head {
  int64_t queries, keys, q, k, v, out, row, element;
  bool across;
} lunai_head;

typedef struct lunai_tile {
  int64_t query, key, width, depth;     /* first query and key; how many */
  int64_t q_step, k_step;               /* from a query's score to the next query's, from a key's to the next key's */
  int64_t lines, length, step;          /* the same as memory layout: lines of `length` scores, `step` apart */
} lunai_tile;

typedef struct lunai_attention_work {
  const lunai_kernels *kernels;
  const lunai_attention *a;
  char *scratch;                        /* the threads' parts, then `partial` */
  size_t thread_bytes;
  int64_t queries, keys;                /* the maximum over the batch */
  int64_t pairs, blocks, run;           /* (batch row, head) pairs; key blocks of a pair; queries of an item */
  int64_t query_blocks, wave, first, last; /* backward: units (pair, key block) at a time, and those of this wave */
  int64_t unit;                         /* floats a unit keeps in `partial` */
  float *partial;
  bool q_shared, k_shared, v_shared;     /* by the batch */
  bool split, backward;                 /* split: blocks of a tile go to several threads */
} lunai_attention_work;

typedef struct lunai_attention_space {  /* a thread's part of the scratch; see lunai_attention_layout */
  float *scores, *slopes, *mask, *mask_row, *clean, *score_panels, *slope_panels, *values, *product;
  float *own, *part, *stats, *state;
} lunai_attention_space;

LUNAI_FN lunai_head lunai_head_at(const lunai_attention *a, int64_t pair) {
  const int64_t b = pair / a->heads, h = pair % a->heads;
  const int64_t query = a->query_offsets ? a->query_offsets[b] : 0, key = a->key_offsets ? a->key_offsets[b] : 0;
  lunai_head r;
  r.queries = a->query_offsets ? a->query_offsets[b + 1] - query : a->queries;
  r.keys = a->key_offsets ? a->key_offsets[b + 1] - key : a->keys;
  if (a->lengths) r.keys = lunai_min(r.keys, lunai_max(a->lengths[b], 0));
  if (a->causal) r.keys = lunai_min(r.keys, r.queries);
  r.q = (a->query_offsets ? query * a->q_row : b * a->q_batch) + h * a->q_head;
  r.out = (a->query_offsets ? query * a->out_row : b * a->out_batch) + h * a->out_head;
  r.k = (a->key_offsets ? key * a->k_row : b * a->k_batch) + h * a->k_head;
  r.v = (a->key_offsets ? key * a->v_row : b * a->v_batch) + h * a->v_head;
  r.row = (a->query_offsets ? query : b * a->queries) * a->heads + h;
  r.element = pair * a->queries * a->keys;
  r.across = r.keys <= LUNAI_FEW_KEYS && r.keys <= r.queries;
  return r;
}

/* the tile of queries from `query` on, before `end`, and of the `depth` keys from `key` on, or fewer where causal */
LUNAI_FN lunai_tile lunai_tile_at(const lunai_attention *a, const lunai_head *head, int64_t query, int64_t end,
                                  int64_t key,
                                  int64_t depth) {
  lunai_tile t;
  t.query = query;
  t.key = key;
  t.width = lunai_min(LUNAI_TILE, end - query);
  t.depth = a->causal ? lunai_min(depth, query + t.width - key) : depth;
  t.lines = head->across ? t.width : t.depth;
  t.length = head->across ? t.depth : t.width;
  /* no power of two: lines would share cache sets */
  t.step = ((head->across ? depth : t.width) + 15) / 16 * 16 + (head->across ? 16 : 0);
  t.q_step = head->across ? t.step : 1;
  t.k_step = head->across ? 1 : t.step;
  return t;
}

LUNAI_FN void lunai_tile_pad(const lunai_tile *t, float *x, float value) {
  int64_t i, j;
  for (i = 0; t->length % 16 != 0 && i < t->lines; i++)
    for (j = t->length; j % 16 != 0; j++) x[i * t->step + j] = value;
}

/* masks the keys after each query */
LUNAI_FN void lunai_tile_hide(const lunai_tile *t, float *x, float value) {
  int64_t i, j;
  for (i = 0; i < t->width; i++)
    for (j = lunai_max(t->query + i + 1 - t->key, 0); j < t->depth; j++) x[i * t->q_step + j * t->k_step] = value;
}

/* The largest sizes, and how to share the work among `threads`, which never changes a bit. */
LUNAI_FN void lunai_attention_plan(lunai_attention_work *w, const lunai_kernels *kernels, const lunai_attention *a,
                                   int64_t threads, bool backward) {
  int64_t b, tiles;
  memset(w, 0, sizeof *w);
  w->kernels = kernels;
  w->a = a;
  w->backward = backward;
  w->pairs = a->batch * a->heads;
  w->q_shared = !a->query_offsets && a->q_batch == 0 && a->batch > 1;
  w->k_shared = !a->key_offsets && a->k_batch == 0 && a->batch > 1;
  w->v_shared = !a->key_offsets && a->v_batch == 0 && a->batch > 1;
  w->queries = a->query_offsets ? 0 : a->queries;
  w->keys = a->key_offsets ? 0 : a->keys;
  for (b = 0; a->query_offsets && b < a->batch; b++) {
    w->queries = lunai_max(w->queries, a->query_offsets[b + 1] - a->query_offsets[b]);
    w->keys = lunai_max(w->keys, a->key_offsets[b + 1] - a->key_offsets[b]);
  }
  if (a->causal) w->keys = lunai_min(w->keys, w->queries);
  w->blocks = lunai_divide_up(w->keys, LUNAI_KEY_BLOCK);
  tiles = lunai_divide_up(w->queries, LUNAI_TILE);
  w->split = !backward && threads > 1 && w->blocks > 1 && tiles <= 8 && w->pairs * tiles < 2 * threads;
  w->run = LUNAI_RUN;
  while (!w->split && w->run > LUNAI_TILE && w->pairs * lunai_divide_up(w->queries, w->run) < 4 * threads) w->run /= 2;
  w->query_blocks = lunai_divide_up(w->queries, LUNAI_KEY_BLOCK);
  w->wave = lunai_min(w->pairs * w->blocks, lunai_divide_up(2 * threads, lunai_max(w->query_blocks, 1)));
  if (!backward) w->unit = tiles * LUNAI_TILE * (a->value_dim + 3);
  else w->unit = w->queries * a->head_dim;
  if (backward && (w->query_blocks > 1 || w->k_shared || w->v_shared))
    w->unit += w->query_blocks * lunai_min(w->keys, LUNAI_KEY_BLOCK) * (a->head_dim + a->value_dim);
}

/* how many keys of a block the queries before `last` see */
LUNAI_FN int64_t lunai_depth(const lunai_attention *a, const lunai_head *head, int64_t block, int64_t last) {
  const int64_t key = block * LUNAI_KEY_BLOCK;
  return lunai_min(lunai_min(LUNAI_KEY_BLOCK, head->keys - key), a->causal ? last - key : LUNAI_KEY_BLOCK);
}

/* in a split's partial result, after the values: maximum, sum and sum after dropout of each query of a tile */
LUNAI_FN float *lunai_stats_of(const lunai_attention_work *w, float *partial, int64_t query) {
  return partial + lunai_divide_up(w->queries, LUNAI_TILE) * LUNAI_TILE * w->a->value_dim + 3 * query;
}

/* whether this unit alone writes its keys' gradients */
LUNAI_FN bool lunai_direct(const lunai_head *head, bool shared) { return !shared && head->queries <= LUNAI_KEY_BLOCK; }

/* the partial gradients a unit keeps: dQ [queries, head_dim], then dK [keys, head_dim] and dV [keys, value_dim] of each
   query block */
LUNAI_FN float *lunai_grad_part(const lunai_attention_work *w, int64_t unit, int64_t query_block) {
  return w->partial + (unit - w->first) * w->unit + w->queries * w->a->head_dim +
         query_block * lunai_min(w->keys, LUNAI_KEY_BLOCK) * (w->a->head_dim + w->a->value_dim);
}


/* a thread's part of the scratch, from `scratch` on; returns its end */
LUNAI_FN char *lunai_attention_layout(const lunai_attention_work *w, char *scratch, lunai_attention_space *m) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const int64_t d = a->head_dim, dv = a->value_dim, depth = lunai_min(w->keys, LUNAI_KEY_BLOCK),
      few = lunai_min(depth, LUNAI_FEW_KEYS);
  const int64_t scores = LUNAI_TILE * ((depth + 15) / 16 * 16 + 16), back = w->backward ? 1 : 0;
  const int64_t masked = a->dropout.threshold ? 1 : 0, tiles = back ? 1 : w->run / LUNAI_TILE;
  m->scores = lunai_take(&scratch, scores);
  m->slopes = lunai_take(&scratch, back * scores);
  m->mask = lunai_take(&scratch, masked * scores);
  m->mask_row = lunai_take(&scratch, masked * depth);
  m->clean = lunai_take(&scratch, a->causal ? depth * (back ? d : dv) : 0);
  m->score_panels = lunai_take(&scratch, lunai_max(lunai_panels_size(kernels, few, d),
                                                   tiles * lunai_panels_size(kernels, LUNAI_TILE, d)));
  m->slope_panels = lunai_take(&scratch, back * lunai_max(lunai_panels_size(kernels, few, dv),
                                                          lunai_panels_size(kernels, LUNAI_TILE, dv)));
  m->values = lunai_take(&scratch, lunai_panels_size(kernels, back ? d : dv, depth)); /* backward: the keys, for dQ */
  m->product = lunai_take(&scratch, back * lunai_panels_size(kernels, lunai_max(d, dv), LUNAI_TILE));
  m->own = lunai_take(&scratch, back * depth * (d + dv));
  m->part = lunai_take(&scratch, back ? 0 : LUNAI_TILE * dv);
  m->stats = lunai_take(&scratch, back ? 0 : 3 * LUNAI_TILE);
  m->state = lunai_take(&scratch, back ? 0 : tiles * 3 * LUNAI_TILE);
  return scratch;
}

LUNAI_FN size_t lunai_attention_start(lunai_attention_work *w, const lunai_kernels *kernels, const lunai_attention *a,
                                      int64_t threads, bool backward, void *scratch) {
  lunai_attention_space space;
  char *zero = (char *)w; /* only distances count */
  int64_t units;
  lunai_attention_plan(w, kernels, a, threads, backward);
  w->thread_bytes = (size_t)(lunai_attention_layout(w, zero, &space) - zero);
  units = backward ? w->wave : w->split ? w->pairs * w->blocks : 0;
  w->scratch = (char *)scratch;
  if (scratch) w->partial = (float *)(void *)(w->scratch + (size_t)threads * w->thread_bytes);
  return (size_t)threads * w->thread_bytes + (size_t)lunai_floats(units * w->unit);
}

/* see below */
LUNAI_FN bool lunai_is_sparse(const lunai_attention *a, bool backward) {
  return a->patterns || (backward && a->grad_lse);
}
LUNAI_FN size_t lunai_sparse_scratch(const lunai_kernels *kernels, const lunai_attention *a, int64_t threads,
                                     bool backward);
LUNAI_FN void lunai_run_sparse(const lunai_kernels *kernels, const lunai_attention *a, const lunai_parallel *parallel,
                               void *scratch);
LUNAI_FN void lunai_run_sparse_backward(const lunai_kernels *kernels, const lunai_attention *a,
                                        const lunai_parallel *parallel, void *scratch);

LUNAI_FN size_t lunai_attention_scratch(const lunai_kernels *kernels, const lunai_attention *a, int64_t threads,
                                        bool backward) {
  lunai_attention_work w;
  if (lunai_is_sparse(a, backward)) return lunai_sparse_scratch(kernels, a, lunai_max(threads, 1), backward);
  return lunai_attention_start(&w, kernels, a, lunai_max(threads, 1), backward, NULL);
}

/* s = factor x y^T for the tile's queries x and keys y; `panels` holds y (across) or x */
LUNAI_FN void lunai_tile_product(const lunai_kernels *kernels, const lunai_tile *t, int64_t dim, const float *x,
                                 int64_t x_row, const float *y, int64_t y_row, const float *panels, float factor,
                                 float *s) {
  if (t->k_step == 1) lunai_matmul_panels(kernels, t->width, t->depth, dim, x, x_row, 1, panels, factor, s, t->step,
                                          false);
  else lunai_matmul_panels(kernels, t->depth, t->width, dim, y, y_row, 1, panels, factor, s, t->step, false);
  lunai_tile_pad(t, s, t->k_step == 1 ? -INFINITY : 0);
}

/* c = factor s y [width, n] for the keys' rows y; `panels` holds them, or is room for them where no other tile needs
   them (`once`) */
LUNAI_FN void lunai_tile_rows_of_keys(const lunai_kernels *kernels, const lunai_tile *t, int64_t n, const float *s,
                                      const float *y, int64_t y_row, bool once, float *panels, float factor, float *c,
                                      int64_t c_row) {
  if (once) lunai_matmul(kernels, t->width, n, t->depth, s, t->q_step, t->k_step, y, y_row, 1, factor, c, c_row, false,
                         panels);
  else lunai_matmul_panels(kernels, t->width, n, t->depth, s, t->q_step, t->k_step, panels, factor, c, c_row, false);
}

/* keep or 0 for each score of the tile */
LUNAI_FN void lunai_tile_mask(const lunai_kernels *kernels, const lunai_attention *a, const lunai_head *head,
                              const lunai_tile *t, float *row, float *mask) {
  int64_t i, j;
  for (i = 0; i < t->width; i++) {
    float *to = t->k_step == 1 ? mask + i * t->q_step : row;
    kernels->dropout_mask(&a->dropout, head->element + (t->query + i) * a->keys + t->key, t->depth, to);
    for (j = 0; to == row && j < t->depth; j++) mask[j * t->k_step + i] = row[j];
  }
  lunai_tile_pad(t, mask, 0);
}

/* adds what finite_copy left out to the queries that see it */
LUNAI_FN void lunai_add_infinite(const lunai_tile *t, const float *s, int64_t n, const float *v, int64_t v_row,
                                 float *part, int64_t part_row) {
  int64_t i, j, c;
  for (j = 0; j < t->depth; j++)
    for (c = 0; c < n; c++)
      if (!(fabs((double)v[j * v_row + c]) < (double)INFINITY))
        for (i = lunai_max(t->key + j - t->query, 0); i < t->width; i++)
          part[i * part_row + c] += s[i * t->q_step + j * t->k_step] * v[j * v_row + c];
}

/* divides the tile's rows by their sums and writes its statistics; without keys all is 0 */
LUNAI_FN void lunai_attention_finish(const lunai_kernels *kernels, const lunai_attention *a, const lunai_head *head,
                                     int64_t query, float *state) {
  const int64_t width = lunai_min(LUNAI_TILE, head->queries - query);
  float *out = a->out + head->out + query * a->out_row;
  int64_t i;
  if (head->keys) kernels->attention_finish(width, a->value_dim, state, out, a->out_row);
  for (i = 0; i < width; i++) {
    const int64_t at = head->row + (query + i) * a->heads;
    if (!head->keys) memset(out + i * a->out_row, 0, (size_t)a->value_dim * sizeof(float));
    if (a->lse) a->lse[at] = head->keys ? state[i] : 0;
    if (a->sums) a->sums[at] = !head->keys ? 0 : a->dropout.threshold ? state[2 * LUNAI_TILE + i] : 1;
  }
}

/* queries [first, last) of a head against key blocks [block, end), into out, or into `partial` where split */
LUNAI_FN void lunai_attention_item(const lunai_attention_work *w, const lunai_attention_space *m,
                                   const lunai_head *head, int64_t first, int64_t last, int64_t block, int64_t end,
                                   float *partial) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const int64_t d = a->head_dim, dv = a->value_dim,
                panels_step = head->across ? 0 : lunai_panels_size(kernels, LUNAI_TILE, d);
  const float *q = a->q + head->q;
  float *mask = a->dropout.threshold ? m->mask : NULL, *panels;
  int64_t query, depth;
  for (query = first, panels = m->score_panels; panels_step && query < last; query += LUNAI_TILE, panels += panels_step)
    kernels->fill_panels(lunai_min(LUNAI_TILE, last - query), d, q + query * a->q_row, 1, a->q_row, panels);
  for (; block < end && (depth = lunai_depth(a, head, block, last)) > 0; block++) {
    const int64_t key = block * LUNAI_KEY_BLOCK;
    const float *k = a->k + head->k + key * a->k_row, *v = a->v + head->v + key * a->v_row;
    const bool edge = a->causal && key + depth > first + 1, once = edge || last - first <= LUNAI_TILE;
    const bool nonfinite = edge && kernels->finite_copy(depth, dv, v, a->v_row, m->clean);
    if (!once) kernels->fill_panels(dv, depth, v, a->v_row, 1, m->values);
    if (head->across) kernels->fill_panels(depth, d, k, 1, a->k_row, m->score_panels);
    for (query = first, panels = m->score_panels; query < last; query += LUNAI_TILE, panels += panels_step) {
      const lunai_tile t = lunai_tile_at(a, head, query, last, key, depth);
      const bool merge = !partial && block > 0;
      float *out = a->out + head->out + query * a->out_row, *state = m->state + 3 * (query - first);
      float *stats = partial ? lunai_stats_of(w, partial, query) : merge ? m->stats : state;
      float *part = partial ? partial + query * dv : merge ? m->part : out;
      const int64_t part_row = part == out ? a->out_row : dv;
      lunai_tile_product(kernels, &t, d, q + query * a->q_row, a->q_row, k, a->k_row, panels, a->scale, m->scores);
      if (edge) lunai_tile_hide(&t, m->scores, -INFINITY);
      if (mask) lunai_tile_mask(kernels, a, head, &t, m->mask_row, mask);
      kernels->tile_softmax(head->across, t.lines, t.length, t.step, m->scores, mask, stats);
      lunai_tile_rows_of_keys(kernels, &t, dv, m->scores, edge ? m->clean : v, edge ? dv : a->v_row, once, m->values, 1,
                              part, part_row);
      if (nonfinite) lunai_add_infinite(&t, m->scores, dv, v, a->v_row, part, part_row);
      if (merge) kernels->attention_merge(t.width, dv, stats, part, state, out, a->out_row);
    }
  }
  for (query = first; !partial && query < last; query += LUNAI_TILE)
    lunai_attention_finish(kernels, a, head, query, m->state + 3 * (query - first));
}

/* items (pair, run of queries), or (pair, run of queries, key block); every threads-th one, as under `causal` later
   ones cost more */
LUNAI_FN void lunai_attention_task(void *work, int64_t thread, int64_t threads) {
  const lunai_attention_work *w = (const lunai_attention_work *)work;
  const int64_t runs = lunai_divide_up(w->queries, w->run), blocks = w->split ? w->blocks : 1,
      items = w->pairs * runs * blocks;
  lunai_attention_space space;
  int64_t item;
  lunai_attention_layout(w, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (item = thread; item < items; item += threads) {
    const int64_t pair = item / (runs * blocks), block = item % blocks, first = item / blocks % runs * w->run;
    const lunai_head head = lunai_head_at(w->a, pair);
    const int64_t last = lunai_min(first + w->run, head.queries);
    if (first >= last) continue;
    if (w->split) lunai_attention_item(w, &space, &head, first, last, block, block + 1,
                                       w->partial + (pair * blocks + block) * w->unit);
    else lunai_attention_item(w, &space, &head, first, last, 0, w->blocks, NULL);
  }
}

/* merges what the split left, by tiles */
LUNAI_FN void lunai_attention_merge_task(void *work, int64_t thread, int64_t threads) {
  const lunai_attention_work *w = (const lunai_attention_work *)work;
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const int64_t tiles = lunai_divide_up(w->queries, LUNAI_TILE), dv = a->value_dim;
  int64_t item, block, i;
  for (item = thread; item < w->pairs * tiles; item += threads) {
    const int64_t pair = item / tiles, query = item % tiles * LUNAI_TILE;
    const lunai_head head = lunai_head_at(a, pair);
    const int64_t width = lunai_min(LUNAI_TILE, head.queries - query);
    /* block 0's */
    float *partial = w->partial + pair * w->blocks * w->unit, *state = lunai_stats_of(w, partial, query);
    float *out = a->out + head.out + query * a->out_row;
    if (width <= 0) continue;
    for (block = 0; lunai_depth(a, &head, block, query + width) > 0; block++, partial += w->unit) {
      const float *part = partial + query * dv;
      if (block > 0) kernels->attention_merge(width, dv, lunai_stats_of(w, partial, query), part, state, out,
                                              a->out_row);
      for (i = 0; block == 0 && i < width; i++) memcpy(out + i * a->out_row, part + i * dv, (size_t)dv * sizeof(float));
    }
    lunai_attention_finish(kernels, a, &head, query, state);
  }
}

LUNAI_FN void lunai_run_attention(const lunai_kernels *kernels, const lunai_attention *a,
                                  const lunai_parallel *parallel, void *scratch) {
  lunai_attention_work w;
  if (lunai_is_sparse(a, false)) {
    lunai_run_sparse(kernels, a, parallel, scratch);
    return;
  }
  lunai_attention_start(&w, kernels, a, lunai_threads(parallel), false, scratch);
  lunai_run(parallel, lunai_attention_task, &w);
  if (w.split) lunai_run(parallel, lunai_attention_merge_task, &w);
}

/* c (+)= factor s^T x [depth, n] for the queries' rows x */
LUNAI_FN void lunai_tile_rows_of_queries(const lunai_kernels *kernels, const lunai_tile *t, int64_t n, const float *s,
                                         const float *x, int64_t x_row, float *panels, float factor, float *c,
                                         bool accumulate) {
  lunai_matmul(kernels, t->depth, n, t->width, s, t->k_step, t->q_step, x, x_row, 1, factor, c, n, accumulate, panels);
}

/* Of each query of a tile: its log-sum-exp, delta = dO . O (+ the gradient of the row's sum, where dropout makes
   that vary) */
LUNAI_FN void lunai_attention_rows(const lunai_kernels *kernels, const lunai_attention *a, const lunai_head *head,
                                   const lunai_tile *t, float *lse, float *delta, float *add) {
  int64_t i;
  for (i = 0; i < LUNAI_TILE; i++) lse[i] = delta[i] = add[i] = 0;
  for (i = 0; i < t->width; i++) {
    const int64_t at = head->row + (t->query + i) * a->heads, row = head->out + (t->query + i) * a->out_row;
    lse[i] = a->lse[at];
    delta[i] = kernels->dot(a->value_dim, a->grad_out + row, a->out + row);
    if (!a->grad_sums || !a->dropout.threshold) continue;
    add[i] = a->grad_sums[at];
    delta[i] += add[i] * a->sums[at];
  }
}

/* y += x, both [rows, n] */
LUNAI_FN void lunai_add_rows(const lunai_kernels *kernels, int64_t rows, int64_t n, const float *x, float *y,
                             int64_t y_row) {
  int64_t i;
  for (i = 0; i < rows; i++) kernels->add(n, y + i * y_row, x + i * n, y + i * y_row);
}

/* the partial gradients of unit (pair, key block) from one query block */
LUNAI_FN void lunai_attention_backward_item(const lunai_attention_work *w, const lunai_attention_space *m, int64_t unit,
                                            int64_t query_block) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const lunai_head head = lunai_head_at(a, unit / w->blocks);
  const int64_t d = a->head_dim, dv = a->value_dim, block = unit % w->blocks, key = block * LUNAI_KEY_BLOCK;
  const int64_t first = query_block * LUNAI_KEY_BLOCK, last = lunai_min(first + LUNAI_KEY_BLOCK, head.queries);
  const int64_t depth = lunai_depth(a, &head, block, last);
  const float *k = a->k + head.k + key * a->k_row, *v = a->v + head.v + key * a->v_row;
  const bool edge = a->causal && key + depth > first + 1, once = edge || last - first <= LUNAI_TILE;
  const bool k_direct = lunai_direct(&head, w->k_shared), v_direct = lunai_direct(&head, w->v_shared);
  float *dq = w->partial + (unit - w->first) * w->unit, *part = lunai_grad_part(w, unit, query_block);
  float *dk = k_direct ? m->own : part, *dvalue = (v_direct ? m->own : part) + depth * d;
  float lse[LUNAI_TILE], delta[LUNAI_TILE], add[LUNAI_TILE], *mask = a->dropout.threshold ? m->mask : NULL;
  int64_t query;
  if (first >= last || depth <= 0) return;
  if (a->causal) {
    memset(dk, 0, (size_t)(depth * d) * sizeof(float));
    memset(dvalue, 0, (size_t)(depth * dv) * sizeof(float));
  }
  if (edge) kernels->finite_copy(depth, d, k, a->k_row, m->clean);
  if (!once) kernels->fill_panels(d, depth, k, a->k_row, 1, m->values);
  if (head.across) {
    kernels->fill_panels(depth, d, k, 1, a->k_row, m->score_panels);
    kernels->fill_panels(depth, dv, v, 1, a->v_row, m->slope_panels);
  }
  for (query = first; query < last; query += LUNAI_TILE) {
    const lunai_tile t = lunai_tile_at(a, &head, query, last, key, depth);
    const bool more = query > first || a->causal;
    const float *q = a->q + head.q + query * a->q_row, *grad = a->grad_out + head.out + query * a->out_row;
    if (!head.across) {
      kernels->fill_panels(t.width, d, q, 1, a->q_row, m->score_panels);
      kernels->fill_panels(t.width, dv, grad, 1, a->out_row, m->slope_panels);
    }
    lunai_tile_product(kernels, &t, d, q, a->q_row, k, a->k_row, m->score_panels, a->scale, m->scores);
    lunai_tile_product(kernels, &t, dv, grad, a->out_row, v, a->v_row, m->slope_panels, 1, m->slopes);
    lunai_attention_rows(kernels, a, &head, &t, lse, delta, add);
    if (mask) lunai_tile_mask(kernels, a, &head, &t, m->mask_row, mask);
    kernels->tile_slopes(head.across, t.lines, t.length, t.step, m->scores, m->slopes, mask, lse, delta, add);
    if (edge) lunai_tile_hide(&t, m->scores, 0);
    if (edge) lunai_tile_hide(&t, m->slopes, 0);
    if (a->grad_v) lunai_tile_rows_of_queries(kernels, &t, dv, m->scores, grad, a->out_row, m->product, 1, dvalue,
                                              more);
    if (a->grad_k) lunai_tile_rows_of_queries(kernels, &t, d, m->slopes, q, a->q_row, m->product, a->scale, dk, more);
    if (a->grad_q)
      lunai_tile_rows_of_keys(kernels, &t, d, m->slopes, edge ? m->clean : k, edge ? d : a->k_row, once, m->values,
                              a->scale, dq + query * d, d);
  }
  if (a->grad_k && k_direct) lunai_add_rows(kernels, depth, d, dk, a->grad_k + head.k + key * a->k_row, a->k_row);
  if (a->grad_v && v_direct) lunai_add_rows(kernels, depth, dv, dvalue, a->grad_v + head.v + key * a->v_row, a->v_row);
}

LUNAI_FN void lunai_attention_backward_task(void *work, int64_t thread, int64_t threads) {
  const lunai_attention_work *w = (const lunai_attention_work *)work;
  const int64_t items = (w->last - w->first) * w->query_blocks;
  lunai_attention_space space;
  int64_t item;
  lunai_attention_layout(w, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (item = thread; item < items; item += threads)
    lunai_attention_backward_item(w, &space, w->first + item / w->query_blocks, item % w->query_blocks);
}

/* this wave's dK and dV of `unit`, query block after query block */
LUNAI_FN void lunai_attention_merge_keys(const lunai_attention_work *w, int64_t unit, bool keys) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const lunai_head head = lunai_head_at(a, unit / w->blocks);
  const int64_t block = unit % w->blocks, key = block * LUNAI_KEY_BLOCK;
  int64_t i;
  if (lunai_direct(&head, keys ? w->k_shared : w->v_shared)) return;
  for (i = 0; i * LUNAI_KEY_BLOCK < head.queries; i++) {
    const int64_t depth = lunai_depth(a, &head, block, lunai_min((i + 1) * LUNAI_KEY_BLOCK, head.queries));
    const float *part = lunai_grad_part(w, unit, i);
    if (depth <= 0) continue;
    if (keys) lunai_add_rows(kernels, depth, a->head_dim, part, a->grad_k + head.k + key * a->k_row, a->k_row);
    else lunai_add_rows(kernels, depth, a->value_dim, part + depth * a->head_dim, a->grad_v + head.v + key * a->v_row,
                        a->v_row);
  }
}

/* Adds this wave's partial gradients in the order of units, so that a tensor that the batch shares gets its sum in
   batch order. Items: each unit's keys, and each tile of queries; the first of those with one destination adds all. */
LUNAI_FN void lunai_attention_gather_task(void *work, int64_t thread, int64_t threads) {
  const lunai_attention_work *w = (const lunai_attention_work *)work;
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const int64_t units = w->last - w->first, tiles = lunai_divide_up(w->queries, LUNAI_TILE),
      same = a->heads * w->blocks;
  const int64_t groups = w->q_shared ? a->heads : (w->last - 1) / w->blocks - w->first / w->blocks + 1;
  int64_t item, unit;
  for (item = thread; item < units; item += threads) {
    const bool opens = item < same; /* no unit before it in this wave has its head and key block */
    for (unit = w->first + item; unit < w->last; unit += same) {
      const bool own = unit == w->first + item;
      if (a->grad_k && (w->k_shared ? opens : own)) lunai_attention_merge_keys(w, unit, true);
      if (a->grad_v && (w->v_shared ? opens : own)) lunai_attention_merge_keys(w, unit, false);
    }
  }
  for (item = thread; a->grad_q && item < groups * tiles; item += threads)
    for (unit = w->first; unit < w->last; unit++) {
      const int64_t pair = unit / w->blocks, query = item % tiles * LUNAI_TILE;
      const lunai_head head = lunai_head_at(a, pair);
      const int64_t width = lunai_min(LUNAI_TILE, head.queries - query);
      if ((w->q_shared ? pair % a->heads : pair - w->first / w->blocks) != item / tiles || width <= 0) continue;
      if (lunai_depth(a, &head, unit % w->blocks, query + width) > 0)
        lunai_add_rows(kernels, width, a->head_dim, w->partial + (unit - w->first) * w->unit + query * a->head_dim,
                       a->grad_q + head.q + query * a->q_row, a->q_row);
    }
}

LUNAI_FN void lunai_run_attention_backward(const lunai_kernels *kernels, const lunai_attention *a,
                                           const lunai_parallel *parallel, void *scratch) {
  lunai_attention_work w;
  if (lunai_is_sparse(a, true)) {
    lunai_run_sparse_backward(kernels, a, parallel, scratch);
    return;
  }
  lunai_attention_start(&w, kernels, a, lunai_threads(parallel), true, scratch);
  for (; w.first < w.pairs * w.blocks; w.first = w.last) {
    w.last = lunai_min(w.first + w.wave, w.pairs * w.blocks);
    lunai_run(parallel, lunai_attention_backward_task, &w);
    lunai_run(parallel, lunai_attention_gather_task, &w);
  }
}
#endif

/* ---- sparse attention: runs of a block's queries by parts of at most LUNAI_KEY_BLOCK of their keys, a tile of queries
   at a time by those keys of the part that it may see. Rows that do not follow one another are copied. Guarded by
   tests/sparse.c. ---- */
#ifndef LUNAI_PASS
#define LUNAI_HIDDEN (-3.0e38f)      /* a score: finite, so that a part of which a query sees nothing gives no NaN */

/* One head of one batch row: its pattern, real sizes, and where it starts in each tensor */
typedef struct lunai_sparse {
  const lunai_attention *a;
  const luna_attention_pattern *p;
  int64_t queries, keys, left, right, blocks;
  int64_t q, k, v, out, row, element;   /* element: of dropout; queries are `numbers` apart */
  int64_t numbers;
} lunai_sparse;
typedef struct lunai_key { int32_t row, number; bool whole; } lunai_key;
typedef struct lunai_key_cursor { int64_t run, at; } lunai_key_cursor; /* a block's next key: at `at` of that run */

LUNAI_FN lunai_sparse lunai_sparse_at(const lunai_attention *a, int64_t pair) {
  static const luna_attention_pattern all = { false, 0, 0, false, 0, NULL, NULL, NULL, NULL, NULL, 0 };
  const int64_t b = pair / a->heads, h = pair % a->heads, unlimited = LUNAI_MAX_COUNT;
  lunai_sparse s;
  s.a = a;
  s.p = !a->patterns ? &all : a->patterns + (a->pattern_count == 1 ? 0 : a->pattern_count == a->heads ? h : pair);
  s.queries = a->lengths && a->patterns ? lunai_min(a->lengths[b], a->queries) : a->queries;
  s.keys = a->lengths ? lunai_min(a->lengths[b], a->keys) : a->keys;
  s.left = s.p->window ? lunai_max(-unlimited, lunai_min(s.p->left, unlimited)) : unlimited;
  s.right = s.p->window ? lunai_max(-unlimited, lunai_min(s.p->right, unlimited)) : unlimited;
  if (a->causal) s.right = lunai_min(s.right, 0);
  s.blocks = lunai_max(s.p->blocks, 1);
  s.q = b * a->q_batch + h * a->q_head;
  s.k = b * a->k_batch + h * a->k_head;
  s.v = b * a->v_batch + h * a->v_head;
  s.out = b * a->out_batch + h * a->out_head;
  s.row = b * a->queries * a->heads + h;
  s.numbers = s.p->key_order ? s.p->key_count : a->keys;
  s.element = pair * a->queries * s.numbers;
  return s;
}
/* its first query's number; of s->blocks: the end */
LUNAI_FN int64_t lunai_sparse_first(const lunai_sparse *s, int64_t block) {
  return s->p->blocks ? s->p->queries[block] : block * s->a->queries;
}
/* the rows of up to `limit` of a block's queries from number *at on, which moves; how many */
LUNAI_FN int64_t lunai_sparse_queries(const lunai_sparse *s, int64_t block, int64_t *at, int64_t limit, int32_t *rows) {
  const int64_t end = lunai_sparse_first(s, block + 1);
  int64_t n = 0;
  for (; *at < end && n < limit; ++*at) {
    const int64_t row = s->p->query_order ? s->p->query_order[*at] : *at;
    if (row < s->queries) rows[n++] = (int32_t)row;
  }
  return n;
}
/* Up to `limit` keys of a block from the cursor on that a query in [low, high] may see; how many. keys may be null:
   counts them. */
LUNAI_FN int64_t lunai_sparse_keys(const lunai_sparse *s, int64_t block, int64_t low, int64_t high,
                                   lunai_key_cursor *at, int64_t limit, lunai_key *keys) {
  const int64_t end = s->p->blocks ? s->p->offsets[block + 1] : 1;
  int64_t n = 0;
  if (s->p->blocks && at->run < s->p->offsets[block]) at->run = s->p->offsets[block];
  for (; at->run < end; at->run++, at->at = 0) {
    const int64_t first = s->p->blocks ? s->p->runs[at->run].first : 0,
        last = s->p->blocks ? first + s->p->runs[at->run].count : s->keys;
    const bool whole = s->p->blocks && s->p->runs[at->run].whole;
    const int64_t from = whole ? 0 : low - s->left, to = whole ? INT32_MAX : high + s->right;
    int64_t f = first + at->at, stop = last;
    if (!s->p->key_order) {
      f = lunai_max(f, from);
      stop = lunai_min(last, lunai_min(s->keys, to + 1));
      if (!keys && stop > f) n += stop - f, f = stop;
    }
    for (; f < stop; f++) {
      const int64_t row = s->p->key_order ? s->p->key_order[f] : f;
      if (row >= s->keys || row < from || row > to) continue;
      if (n == limit) {
        at->at = f - first;
        return n;
      }
      if (keys) keys[n].row = (int32_t)row, keys[n].number = (int32_t)f, keys[n].whole = whole;
      n++;
    }
  }
  return n;
}
LUNAI_FN bool lunai_sparse_sees(const lunai_sparse *s, int64_t query, const lunai_key *key) {
  const int64_t distance = key->row - query;
  return key->whole || (distance >= -s->left && distance <= s->right && !(s->p->not_self && distance == 0));
}

/* what queries get that no block has */
LUNAI_FN void lunai_sparse_clear(const lunai_attention *a, int64_t pair) {
  const lunai_sparse s = lunai_sparse_at(a, pair);
  int64_t i = s.p->blocks ? 0 : s.queries;
  for (; i < a->queries; i++) {
    memset(a->out + s.out + i * a->out_row, 0, (size_t)a->value_dim * sizeof(float));
    if (a->lse) a->lse[s.row + i * a->heads] = -INFINITY;
  }
}

/* The reference: one query at a time, its keys in parts. */
#define LUNAI_KEY_PART 64
typedef struct lunai_sparse_walk { lunai_key_cursor cursor; lunai_key key[LUNAI_KEY_PART]; int64_t n, i;
                                   } lunai_sparse_walk;
/* the next key that a query of a block sees, or null; the walk starts as zeros */
LUNAI_FN const lunai_key *lunai_sparse_next(const lunai_sparse *s, int64_t block, int64_t query, lunai_sparse_walk *w) {
  for (;;) {
    for (; w->i < w->n; w->i++)
      if (lunai_sparse_sees(s, query, &w->key[w->i])) return &w->key[w->i++];
    w->i = 0;
    w->n = lunai_sparse_keys(s, block, query, query, &w->cursor, LUNAI_KEY_PART, w->key);
    if (w->n == 0) return NULL;
  }
}
LUNAI_FN float lunai_sparse_score(const lunai_sparse *s, int64_t query,
                                  const lunai_key *key) {
  const lunai_attention *a = s->a;
  return a->scale * lunai_dot_reference(a->head_dim, a->q + s->q + query * a->q_row, a->k + s->k + key->row * a->k_row);
}
LUNAI_FN void lunai_sparse_row(const lunai_sparse *s, int64_t block, int64_t query) {
  const lunai_attention *a = s->a;
  float *out = a->out + s->out + query * a->out_row, max = -INFINITY, total = 0;
  const lunai_key *key;
  lunai_sparse_walk w;
  memset(out, 0, (size_t)a->value_dim * sizeof(float));
  memset(&w, 0, sizeof w);
  while ((key = lunai_sparse_next(s, block, query, &w)) != NULL) {
    const float score = lunai_sparse_score(s, query, key);
    if (!(score <= max)) max = score;
  }
  memset(&w, 0, sizeof w);
  while ((key = lunai_sparse_next(s, block, query, &w)) != NULL) {
    const float p = lunai_exp1_scalar(lunai_sparse_score(s, query, key) - max);
    total += p;
    lunai_scale_add_reference(a->value_dim, p * lunai_dropout_at(&a->dropout,
                                                                 s->element + query * s->numbers + key->number),
                       a->v + s->v + key->row * a->v_row, out);
  }
  if (a->lse) a->lse[s->row + query * a->heads] = max + lunai_log1_scalar(total); /* -Inf without a key */
  if (total != 0) lunai_scale_reference(a->value_dim, 1 / total, out, out);
}
LUNAI_FN void lunai_sparse_row_backward(const lunai_sparse *s, int64_t block,
                                        int64_t query) {
  const lunai_attention *a = s->a;
  const int64_t at = s->row + query * a->heads, out = s->out + query * a->out_row, q = s->q + query * a->q_row;
  const float *g = a->grad_out + out;
  const float mean = lunai_dot_reference(a->value_dim, g, a->out + out) - (a->grad_lse ? a->grad_lse[at] : 0);
  const lunai_key *key;
  lunai_sparse_walk w;
  memset(&w, 0, sizeof w);
  while ((key = lunai_sparse_next(s, block, query, &w)) != NULL) {
    const int64_t k = s->k + key->row * a->k_row, v = s->v + key->row * a->v_row;
    const float p = lunai_exp1_scalar(lunai_sparse_score(s, query, key) - a->lse[at]);
    const float mask = lunai_dropout_at(&a->dropout, s->element + query * s->numbers + key->number);
    const float ds = a->scale * p * (mask * lunai_dot_reference(a->value_dim, g, a->v + v) - mean);
    if (a->grad_q) lunai_scale_add_reference(a->head_dim, ds, a->k + k, a->grad_q + q);
    if (a->grad_k) lunai_scale_add_reference(a->head_dim, ds, a->q + q, a->grad_k + k);
    if (a->grad_v) lunai_scale_add_reference(a->value_dim, p * mask, g, a->grad_v + v);
  }
}
LUNAI_FN void lunai_sparse_rows(const lunai_attention *a, bool backward) {
  int64_t pair, block;
  for (pair = 0; pair < a->batch * a->heads; pair++) {
    const lunai_sparse s = lunai_sparse_at(a, pair);
    if (!backward) lunai_sparse_clear(a, pair);
    for (block = 0; block < s.blocks; block++) {
      int64_t at = lunai_sparse_first(&s, block);
      int32_t query;
      while (lunai_sparse_queries(&s, block, &at, 1, &query))
        (backward ? lunai_sparse_row_backward : lunai_sparse_row)(&s, block, query);
    }
  }
}
LUNAI_FN void lunai_attention_reference(const lunai_attention *a, const lunai_parallel *parallel, void *scratch) {
  (void)parallel, (void)scratch;
  if (lunai_is_sparse(a, false)) lunai_sparse_rows(a, false);
  else lunai_dense_reference(a);
}
LUNAI_FN void lunai_attention_backward_reference(const lunai_attention *a, const lunai_parallel *parallel,
                                                 void *scratch) {
  (void)parallel, (void)scratch;
  if (lunai_is_sparse(a, true)) lunai_sparse_rows(a, true);
  else lunai_dense_backward_reference(a);
}

/* up to LUNAI_RUN queries of a block */
typedef struct lunai_sparse_run {
  int64_t block, at;                    /* at: the number of the query after them; -1: the block's first is next */
  int64_t width, low, high;             /* how many; the least and the greatest row */
  bool together;                        /* they follow one another */
  int32_t row[LUNAI_RUN];
} lunai_sparse_run;

/* a tile of a run's queries, and those keys of a part that one of them may see */
typedef struct lunai_sparse_tile {
  const int32_t *row;
  int64_t first, low, high;             /* first: its number in the run */
  int64_t key;                          /* its first key's number in the part */
  const lunai_key *keys;
  bool together, in_order;              /* queries, and keys, that follow one another; of such keys none is whole */
  lunai_tile t;
} lunai_sparse_tile;

typedef struct lunai_sparse_space {     /* a thread's part of the scratch */
  float *scores, *slopes, *mask, *mask_row, *q, *grad, *k, *v, *clean, *score_panels, *slope_panels, *values, *product;
  float *out, *part, *stats, *state;
  lunai_key *key;
} lunai_sparse_space;

/* backward: a run, a part of its keys, and their partial gradients dQ [width, head_dim], dK [n, head_dim], dV [n,
   value_dim]; direct: dQ goes to its place, where nothing else is added */
typedef struct lunai_sparse_part {
  lunai_sparse s;
  lunai_sparse_run run;
  int64_t n;
  bool direct;
  lunai_key *key;
  float *q, *k, *v;
} lunai_sparse_part;

typedef struct lunai_sparse_work {
  const lunai_kernels *kernels;
  const lunai_attention *a;
  char *scratch;
  size_t thread_bytes;
  int64_t tile, wide;                   /* queries of a tile: whole panels, or a part of one; of keys' gradients: a
                                           multiple of that */
  bool backward, copied;                /* copied: by lists, rows may not follow one another */
  bool shared;                          /* grad_q: by heads, sequences, or with keys or values; or there is none */
  lunai_sparse_part *parts;             /* backward: of this wave */
  int64_t wave, count;
  int64_t pair, keys, limit;            /* where the next part begins; keys: of its run */
  lunai_key_cursor cursor;
  lunai_sparse s;
  lunai_sparse_run walk;
} lunai_sparse_work;

LUNAI_FN void lunai_sparse_bounds(int64_t n, const int32_t *row, bool together, int64_t *low, int64_t *high) {
  int64_t i;
  *low = row[0];
  *high = row[together ? n - 1 : 0];
  for (i = 1; i < n && !together; i++) {
    *low = lunai_min(*low, row[i]);
    *high = lunai_max(*high, row[i]);
  }
}
/* the next queries of the head; false after the last. A walk begins with block 0, at -1. */
LUNAI_FN bool lunai_sparse_next_run(const lunai_sparse *s, lunai_sparse_run *r) {
  for (; r->block < s->blocks; r->block++, r->at = -1) {
    if (r->at < 0) r->at = lunai_sparse_first(s, r->block);
    r->width = lunai_sparse_queries(s, r->block, &r->at, LUNAI_RUN, r->row);
    if (r->width == 0) continue;
    r->together = !s->p->query_order;
    lunai_sparse_bounds(r->width, r->row, r->together, &r->low, &r->high);
    return true;
  }
  return false;
}
LUNAI_FN int64_t lunai_sparse_count(const lunai_sparse *s, const lunai_sparse_run *r) {
  lunai_key_cursor cursor = { 0, 0 };
  return lunai_sparse_keys(s, r->block, r->low, r->high, &cursor, INT64_MAX, NULL);
}
/* how many of a run's keys to take at a time: about equal parts; 0: there are none */
LUNAI_FN int64_t lunai_sparse_limit(int64_t keys) {
  return lunai_divide_up(lunai_divide_up(keys, lunai_max(lunai_divide_up(keys, LUNAI_KEY_BLOCK), 1)), 16) * 16;
}
LUNAI_FN bool lunai_sparse_in_order(int64_t n, const lunai_key *key) {
  int64_t i;
  for (i = 0; i < n && !key[i].whole && key[i].row == key[0].row + i; i++);
  return i == n;
}
/* of a part's n keys; t.depth 0: it sees none of them */
LUNAI_FN lunai_sparse_tile lunai_sparse_tile_of(const lunai_sparse *s, const lunai_sparse_run *r, int64_t first,
                                                int64_t width, int64_t n, const lunai_key *key,
                                                bool in_order) {
  lunai_sparse_tile q;
  memset(&q, 0, sizeof q);
  q.in_order = in_order;
  q.row = r->row + first;
  q.first = first;
  q.together = r->together;
  q.t.width = q.t.length = lunai_min(width, r->width - first);
  lunai_sparse_bounds(q.t.width, q.row, q.together, &q.low, &q.high);
  if (in_order) {
    q.key = lunai_min(n, lunai_max(0, q.low - s->left - key[0].row));
    n = lunai_max(q.key, lunai_min(n, q.high + s->right + 1 - key[0].row));
  }
  while (q.key < n && !key[q.key].whole && (key[q.key].row < q.low - s->left || key[q.key].row > q.high + s->right))
    q.key++;
  while (n > q.key && !key[n - 1].whole && (key[n - 1].row < q.low - s->left || key[n - 1].row > q.high + s->right))
    n--;
  q.keys = key + q.key;
  q.t.depth = q.t.lines = n - q.key;
  q.t.k_step = q.t.step = lunai_divide_up(q.t.width, 16) * 16;
  q.t.q_step = 1;
  return q;
}

LUNAI_FN char *lunai_sparse_layout(const lunai_sparse_work *w, char *scratch, lunai_sparse_space *m) {
  const lunai_kernels *kernels = w->kernels;
  const int64_t d = w->a->head_dim, dv = w->a->value_dim, depth = LUNAI_KEY_BLOCK, back = w->backward ? 1 : 0;
  const int64_t masked = w->a->dropout.threshold ? 1 : 0, copied = w->copied ? 1 : 0;
  const int64_t tiles = lunai_divide_up(LUNAI_RUN, w->tile), queries = back ? LUNAI_TILE : LUNAI_RUN;
  m->scores = lunai_take(&scratch, LUNAI_TILE * depth);
  m->slopes = lunai_take(&scratch, back * LUNAI_TILE * depth);
  m->mask = lunai_take(&scratch, masked * LUNAI_TILE * depth);
  m->mask_row = lunai_take(&scratch, masked * depth);
  m->q = lunai_take(&scratch, copied * LUNAI_RUN * d);
  m->grad = lunai_take(&scratch, copied * back * LUNAI_RUN * dv);
  m->k = lunai_take(&scratch, copied * depth * d);
  m->v = lunai_take(&scratch, copied * depth * dv);
  m->clean = lunai_take(&scratch, depth * lunai_max(d, dv));
  m->score_panels = lunai_take(&scratch, lunai_panels_size(kernels, queries, d));
  m->slope_panels = lunai_take(&scratch, back * lunai_panels_size(kernels, queries, dv));
  m->values = lunai_take(&scratch, lunai_panels_size(kernels, back ? d : dv, depth));
  m->product = lunai_take(&scratch, back * lunai_panels_size(kernels, lunai_max(d, dv), LUNAI_TILE));
  m->out = lunai_take(&scratch, copied * (1 - back) * LUNAI_RUN * dv);
  m->part = lunai_take(&scratch, (1 - back) * w->tile * dv);
  m->stats = lunai_take(&scratch, 3 * LUNAI_TILE);
  m->state = lunai_take(&scratch, tiles * 3 * LUNAI_TILE);
  m->key = (lunai_key *)(void *)lunai_take(&scratch, depth * (int64_t)(sizeof(lunai_key) / sizeof(float)));
  return scratch;
}
LUNAI_FN size_t lunai_sparse_start(lunai_sparse_work *w, const lunai_kernels *kernels, const lunai_attention *a,
                                   int64_t threads,
                                   bool backward, void *scratch) {
  lunai_sparse_space space;
  char *at = scratch ? (char *)scratch : (char *)w, *const start = at; /* without one only distances count */
  int64_t i;
  memset(w, 0, sizeof *w);
  w->kernels = kernels;
  w->a = a;
  w->backward = backward;
  w->tile = w->wide = LUNAI_TILE / kernels->nr * kernels->nr;
  for (i = 0; i < a->pattern_count; i++) {
    if (a->patterns[i].window) {         /* fewer keys outside the windows */
      w->tile = kernels->nr % 3 ? 16 : 24;
      w->wide = kernels->nr % 3 ? 32 : 24;
    }
    if (a->patterns[i].blocks) w->copied = true;
  }
  w->scratch = at;
  w->thread_bytes = (size_t)(lunai_sparse_layout(w, at, &space) - at);
  at += (size_t)threads * w->thread_bytes;
  w->wave = backward ? 2 * threads : 0;
  w->parts = (lunai_sparse_part *)(void *)at;
  at += lunai_round((size_t)w->wave * sizeof *w->parts);
  for (i = 0; i < w->wave; i++) {
    float *q = lunai_take(&at, LUNAI_RUN * a->head_dim), *k = lunai_take(&at, LUNAI_KEY_BLOCK * a->head_dim);
    float *v = lunai_take(&at, LUNAI_KEY_BLOCK * a->value_dim);
    float *key = lunai_take(&at, LUNAI_KEY_BLOCK * (int64_t)(sizeof(lunai_key) / sizeof(float)));
    if (!scratch) continue;
    w->parts[i].q = q;
    w->parts[i].k = k;
    w->parts[i].v = v;
    w->parts[i].key = (lunai_key *)(void *)key;
  }
  w->shared = (a->heads > 1 && a->q_head == 0) || (a->batch > 1 && a->q_batch == 0) || !a->grad_q ||
              a->grad_q == a->grad_k || a->grad_q == a->grad_v;
  w->pair = -1;
  return (size_t)(at - start);
}

/* n rows of x, whose numbers are `apart` apart: in place where they follow one another, else copied to `to` */
LUNAI_FN const float *lunai_sparse_rows_of(int64_t n, const int32_t *row, int64_t apart, int64_t width, const float *x,
                                           int64_t *x_row, float *to) {
  int64_t i;
  for (i = 1; i < n && row[i * apart] == row[0] + i; i++);
  if (i >= n) return x + row[0] * *x_row;
  for (i = 0; i < n; i++) memcpy(to + i * width, x + row[i * apart] * *x_row, (size_t)width * sizeof(float));
  *x_row = width;
  return to;
}
#define LUNAI_KEYS_APART ((int64_t)(sizeof(lunai_key) / sizeof(int32_t)))

/* what a query does not see becomes `value` */
LUNAI_FN void lunai_sparse_hide(const lunai_kernels *kernels, const lunai_sparse *s, const lunai_sparse_tile *q,
                                float *x, float value) {
  const int64_t width = q->t.width, lowest = q->high - s->left, highest = q->low + s->right; /* those that all see */
  int64_t i, j, lines;
  for (j = 0; j < q->t.depth; j += lines, x += lines * q->t.k_step) {
    const lunai_key *key = &q->keys[j];
    const bool before = key->row < lowest, all = !before && key->row <= highest && !s->p->not_self;
    lines = !q->in_order || s->p->not_self || !(all || q->together) ? 1 :
            lunai_min(before ? lowest - key->row : all ? highest - key->row + 1 : q->t.depth, q->t.depth - j);
    if (key->whole || all) continue;
    if (q->together && !s->p->not_self)
      kernels->tile_hide(lines, width, q->t.k_step, lunai_max(key->row - highest, -LUNAI_KEY_BLOCK),
                         lunai_min(key->row - q->low + s->left + 1, width), value, x);
    else
      for (i = 0; i < width; i++)
        if (!lunai_sparse_sees(s, q->row[i], key)) x[i] = value;
  }
}
/* adds what finite_copy left out to the queries that see it */
LUNAI_FN void lunai_sparse_infinite(const lunai_sparse *s, const lunai_sparse_tile *q, const float *scores, int64_t n,
                                    const float *v, int64_t v_row, float *part,
                                    int64_t part_row) {
  int64_t i, j, c;
  for (j = 0; j < q->t.depth; j++)
    for (c = 0; c < n; c++)
      if (!(fabs((double)v[j * v_row + c]) < (double)INFINITY))
        for (i = 0; i < q->t.width; i++)
          if (lunai_sparse_sees(s, q->row[i], &q->keys[j]))
            part[i * part_row + c] += scores[i + j * q->t.k_step] * v[j * v_row + c];
}
LUNAI_FN void lunai_sparse_mask(const lunai_kernels *kernels, const lunai_sparse *s, const lunai_sparse_tile *q,
                                float *row, float *mask) {
  int64_t i, j, end;
  for (i = 0; i < q->t.width; i++) {
    for (j = 0; j < q->t.depth; j = end) {
      for (end = j + 1; end < q->t.depth && q->keys[end].number == q->keys[end - 1].number + 1; end++);
      kernels->dropout_mask(&s->a->dropout, s->element + q->row[i] * s->numbers + q->keys[j].number, end - j, row + j);
    }
    for (j = 0; j < q->t.depth; j++) mask[j * q->t.k_step + i] = row[j];
  }
  lunai_tile_pad(&q->t, mask, 0);
}

/* Of a tile those queries from i on, `width` of them, and the keys that one of them may see; its scores lie in the
   tile's, `key` rows on and i columns. */
LUNAI_FN lunai_sparse_tile lunai_sparse_narrower(const lunai_sparse *s, const lunai_sparse_run *r,
                                                 const lunai_sparse_tile *q, int64_t i, int64_t width) {
  lunai_sparse_tile x = lunai_sparse_tile_of(s, r, q->first + i, lunai_min(width, q->t.width - i), q->t.depth, q->keys,
                                             q->in_order);
  x.t.step = x.t.k_step = q->t.step;
  return x;
}
/* to = factor x y^T of a tile, by narrower ones of whole panels; beside the scores of these it is as it was. panels: x,
   from the tile's first query on */
LUNAI_FN void lunai_sparse_product(const lunai_sparse_work *w, const lunai_sparse *s, const lunai_sparse_run *r,
                                   const lunai_sparse_tile *q, int64_t dim, const float *y, int64_t y_row,
                                   const float *panels, float factor, float *to) {
  const int64_t width = lunai_max(w->tile, w->kernels->nr);
  int64_t i;
  for (i = 0; i < q->t.width; i += width) {
    const lunai_sparse_tile x = lunai_sparse_narrower(s, r, q, i, width);
    if (x.t.depth)
      lunai_tile_product(w->kernels, &x.t, dim, NULL, 0, y + x.key * y_row, y_row, panels + i * dim, factor,
                         to + x.key * x.t.step + i);
  }
}

/* what a run keeps from part to part */
typedef struct lunai_sparse_rows_at {
  float *out;
  int64_t out_row;
  bool seen[LUNAI_RUN];                 /* of each tile: whether it has had keys */
} lunai_sparse_rows_at;
LUNAI_FN void lunai_sparse_part_forward(const lunai_sparse_work *w, const lunai_sparse_space *m, const lunai_sparse *s,
                                        const lunai_sparse_run *r, int64_t n,
                                        lunai_sparse_rows_at *x) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const int64_t d = a->head_dim, dv = a->value_dim, nr = kernels->nr;
  int64_t k_row = a->k_row, v_row = a->v_row, first, tile;
  const float *k = lunai_sparse_rows_of(n, &m->key->row, LUNAI_KEYS_APART, d, a->k + s->k, &k_row, m->k);
  const float *v = lunai_sparse_rows_of(n, &m->key->row, LUNAI_KEYS_APART, dv, a->v + s->v, &v_row, m->v);
  const bool finite = kernels->all_finite(n, dv, v, v_row), in_order = lunai_sparse_in_order(n, m->key);
  float *mask = a->dropout.threshold ? m->mask : NULL;
  if (!finite) kernels->finite_copy(n, dv, v, v_row, m->clean);
  kernels->fill_panels(dv, n, finite ? v : m->clean, finite ? v_row : dv, 1, m->values);
  for (first = 0, tile = 0; first < r->width; first += w->tile, tile++) {
    const lunai_sparse_tile q = lunai_sparse_tile_of(s, r, first, w->tile, n, m->key, in_order);
    const bool merge = x->seen[tile];
    float *state = m->state + 3 * LUNAI_TILE * tile, *stats = merge ? m->stats : state,
        *out = x->out + first * x->out_row, *part = merge ? m->part : out;
    const int64_t part_row = merge ? dv : x->out_row;
    if (q.t.depth == 0) continue;
    x->seen[tile] = true;
    lunai_tile_product(kernels, &q.t, d, NULL, 0, k + q.key * k_row, k_row,
                       m->score_panels + first / nr * nr * d + first % nr, a->scale, m->scores);
    lunai_sparse_hide(kernels, s, &q, m->scores, LUNAI_HIDDEN);
    if (mask) lunai_sparse_mask(kernels, s, &q, m->mask_row, mask);
    kernels->tile_softmax(false, q.t.lines, q.t.length, q.t.step, m->scores, mask, stats);
    lunai_matmul_blocks(kernels, q.t.width, dv, q.t.depth, m->scores, 1, q.t.k_step, m->values + q.key * kernels->nr,
                        n * kernels->nr, kernels->nr, 1, part,
                        part_row, false);
    if (!finite) lunai_sparse_infinite(s, &q, m->scores, dv, v + q.key * v_row, v_row, part, part_row);
    if (merge) kernels->attention_merge(q.t.width, dv, stats, part, state, out, x->out_row);
  }
}
LUNAI_FN void lunai_sparse_run_forward(const lunai_sparse_work *w, const lunai_sparse_space *m, const lunai_sparse *s,
                                       const lunai_sparse_run *r) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const int64_t d = a->head_dim, dv = a->value_dim, limit = lunai_sparse_limit(lunai_sparse_count(s, r));
  lunai_key_cursor cursor = { 0, 0 };
  lunai_sparse_rows_at x;
  const float *q;
  int64_t q_row, n, i;
  memset(x.seen, 0, sizeof x.seen);
  q_row = a->q_row;
  q = lunai_sparse_rows_of(r->width, r->row, 1, d, a->q + s->q, &q_row, m->q);
  x.out = r->together ? a->out + s->out + r->row[0] * a->out_row : m->out;
  x.out_row = r->together ? a->out_row : dv;
  kernels->fill_panels(r->width, d, q, 1, q_row, m->score_panels);
  while (limit && (n = lunai_sparse_keys(s, r->block, r->low, r->high, &cursor, limit, m->key)) > 0)
    lunai_sparse_part_forward(w, m, s, r, n, &x);
  for (i = 0; i < r->width; i++) {
    float *state = m->state + 3 * LUNAI_TILE * (i / w->tile), *row = a->out + s->out + r->row[i] * a->out_row;
    const bool seen = x.seen[i / w->tile];
    bool none;
    if (i % w->tile == 0 && seen)
      kernels->attention_finish(lunai_min(w->tile, r->width - i), dv, state, x.out + i * x.out_row, x.out_row);
    none = !seen || state[i % w->tile] < 0.5f * LUNAI_HIDDEN; /* NaN is not */
    if (none) memset(row, 0, (size_t)dv * sizeof(float));
    else if (!r->together) memcpy(row, x.out + i * dv, (size_t)dv * sizeof(float));
    if (a->lse) a->lse[s->row + r->row[i] * a->heads] = none ? -INFINITY : state[i % w->tile];
  }
}
LUNAI_FN void lunai_sparse_task(void *work, int64_t thread, int64_t threads) {
  const lunai_sparse_work *w = (const lunai_sparse_work *)work;
  const int64_t pairs = w->a->batch * w->a->heads;
  int64_t pair, count = 0;
  lunai_sparse_space space;
  lunai_sparse_layout(w, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (pair = 0; pair < pairs; pair++) {
    const lunai_sparse s = lunai_sparse_at(w->a, pair);
    lunai_sparse_run r;
    r.block = 0;
    for (r.at = -1; lunai_sparse_next_run(&s, &r); count++)
      if (count % threads == thread) lunai_sparse_run_forward(w, &space, &s, &r);
  }
}
LUNAI_FN void lunai_sparse_clear_task(void *work, int64_t thread, int64_t threads) {
  const lunai_attention *a = ((const lunai_sparse_work *)work)->a;
  int64_t pair;
  for (pair = thread; pair < a->batch * a->heads; pair += threads) lunai_sparse_clear(a, pair);
}
LUNAI_FN size_t lunai_sparse_scratch(const lunai_kernels *kernels, const lunai_attention *a, int64_t threads,
                                     bool backward) {
  lunai_sparse_work w;
  return lunai_sparse_start(&w, kernels, a, threads, backward, NULL);
}
LUNAI_FN void lunai_run_sparse(const lunai_kernels *kernels, const lunai_attention *a, const lunai_parallel *parallel,
                               void *scratch) {
  lunai_sparse_work w;
  lunai_sparse_start(&w, kernels, a, lunai_threads(parallel), false, scratch);
  lunai_run(parallel, lunai_sparse_clear_task, &w);
  lunai_run(parallel, lunai_sparse_task, &w);
}

/* backward: the next run's next keys; false after the last */
LUNAI_FN bool lunai_sparse_next_part(lunai_sparse_work *w, lunai_sparse_part *part) {
  for (;;) {
    part->n = w->limit ? lunai_sparse_keys(&w->s, w->walk.block, w->walk.low, w->walk.high, &w->cursor, w->limit,
                                           part->key) : 0;
    part->s = w->s;
    part->run = w->walk;
    part->direct = part->n == w->keys && w->walk.together && !w->shared;
    if (part->n > 0) return true;
    while (w->pair < 0 || !lunai_sparse_next_run(&w->s, &w->walk)) {
      if (++w->pair >= w->a->batch * w->a->heads) return false;
      w->s = lunai_sparse_at(w->a, w->pair);
      w->walk.block = 0;
      w->walk.at = -1;
    }
    w->keys = lunai_sparse_count(&w->s, &w->walk);
    w->limit = lunai_sparse_limit(w->keys);
    w->cursor.run = w->cursor.at = 0;
  }
}
/* of each query of a tile: its log-sum-exp, and delta = dO . O - the gradient of that */
LUNAI_FN void lunai_sparse_stats(const lunai_sparse_work *w, const lunai_sparse *s, const lunai_sparse_tile *q,
                                 float *lse, float *delta) {
  const lunai_attention *a = w->a;
  int64_t i;
  for (i = 0; i < LUNAI_TILE; i++) lse[i] = delta[i] = 0;
  for (i = 0; i < q->t.width; i++) {
    const int64_t at = s->row + q->row[i] * a->heads, out = s->out + q->row[i] * a->out_row;
    lse[i] = a->lse[at];
    delta[i] = w->kernels->dot(a->value_dim, a->grad_out + out, a->out + out) - (a->grad_lse ? a->grad_lse[at] : 0);
  }
}
LUNAI_FN void lunai_sparse_part_backward(const lunai_sparse_work *w, const lunai_sparse_space *m,
                                         const lunai_sparse_part *part) {
  const lunai_kernels *kernels = w->kernels;
  const lunai_attention *a = w->a;
  const lunai_sparse *s = &part->s;
  const lunai_sparse_run *r = &part->run;
  const int64_t d = a->head_dim, dv = a->value_dim, n = part->n;
  int64_t q_row = a->q_row, grad_row = a->out_row, k_row = a->k_row, v_row = a->v_row, first, i;
  const float *x = lunai_sparse_rows_of(r->width, r->row, 1, d, a->q + s->q, &q_row, m->q);
  const float *grad = lunai_sparse_rows_of(r->width, r->row, 1, dv, a->grad_out + s->out, &grad_row, m->grad);
  const float *k = lunai_sparse_rows_of(n, &part->key->row, LUNAI_KEYS_APART, d, a->k + s->k, &k_row, m->k);
  const float *v = lunai_sparse_rows_of(n, &part->key->row, LUNAI_KEYS_APART, dv, a->v + s->v, &v_row, m->v);
  const bool finite = kernels->all_finite(n, d, k, k_row), in_order = lunai_sparse_in_order(n, part->key);
  float lse[LUNAI_TILE], delta[LUNAI_TILE], none[LUNAI_TILE] = {0}, *mask = a->dropout.threshold ? m->mask : NULL;
  float *to = part->direct ? a->grad_q + s->q + r->row[0] * a->q_row : part->q;
  const int64_t to_row = part->direct ? a->q_row : d;
  if (!part->direct) memset(part->q, 0, (size_t)(r->width * d) * sizeof(float));
  memset(part->k, 0, (size_t)(n * d) * sizeof(float));
  memset(part->v, 0, (size_t)(n * dv) * sizeof(float));
  if (!finite) kernels->finite_copy(n, d, k, k_row, m->clean); /* a query may not see it, and 0 * NaN is NaN */
  kernels->fill_panels(d, n, finite ? k : m->clean, finite ? k_row : d, 1, m->values);
  for (first = 0; first < r->width; first += w->wide) {
    const lunai_sparse_tile q = lunai_sparse_tile_of(s, r, first, w->wide, n, part->key, in_order);
    const lunai_tile *t = &q.t;
    const float *tile_x = x + first * q_row, *tile_grad = grad + first * grad_row;
    if (t->depth == 0) continue;
    kernels->fill_panels(t->width, d, tile_x, 1, q_row, m->score_panels);
    kernels->fill_panels(t->width, dv, tile_grad, 1, grad_row, m->slope_panels);
    lunai_sparse_product(w, s, r, &q, d, k + q.key * k_row, k_row, m->score_panels, a->scale, m->scores);
    lunai_sparse_product(w, s, r, &q, dv, v + q.key * v_row, v_row, m->slope_panels, 1, m->slopes);
    if (mask) lunai_sparse_mask(kernels, s, &q, m->mask_row, mask);
    lunai_sparse_stats(w, s, &q, lse, delta);
    kernels->tile_slopes(false, t->lines, t->length, t->step, m->scores, m->slopes, mask, lse, delta, none);
    lunai_sparse_hide(kernels, s, &q, m->scores, 0);
    lunai_sparse_hide(kernels, s, &q, m->slopes, 0);
    if (a->grad_v)
      lunai_tile_rows_of_queries(kernels, t, dv, m->scores, tile_grad, grad_row, m->product, 1, part->v + q.key * dv,
                                 true);
    if (a->grad_k)
      lunai_tile_rows_of_queries(kernels, t, d, m->slopes, tile_x, q_row, m->product, a->scale, part->k + q.key * d,
                                 true);
    for (i = 0; a->grad_q && i < t->width; i += w->tile) {
      const lunai_sparse_tile c = lunai_sparse_narrower(s, r, &q, i, w->tile);
      lunai_matmul_blocks(kernels, c.t.width, d, c.t.depth, m->slopes + c.key * t->k_step + i, 1, t->k_step,
                          m->values + (q.key + c.key) * kernels->nr, n * kernels->nr, kernels->nr, a->scale,
                          to + (first + i) * to_row, to_row, part->direct);
    }
  }
}
LUNAI_FN void lunai_sparse_backward_task(void *work, int64_t thread, int64_t threads) {
  const lunai_sparse_work *w = (const lunai_sparse_work *)work;
  lunai_sparse_space space;
  int64_t i;
  lunai_sparse_layout(w, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (i = thread; i < w->count; i += threads) lunai_sparse_part_backward(w, &space, &w->parts[i]);
}
/* adds this wave's partial gradients part by part. Each thread has rows of its own, of whatever head or batch row. */
LUNAI_FN void lunai_sparse_add(const lunai_sparse_work *w, int64_t thread, int64_t threads, int64_t n,
                               const int32_t *row, int64_t apart, int64_t width,
                               const float *from, float *to, int64_t to_row) {
  int64_t i;
  for (i = 0; to && i < n; i++) {
    const int64_t at = row[i * apart];
    if (at / 16 % threads == thread) w->kernels->add(width, to + at * to_row, from + i * width, to + at * to_row);
  }
}
LUNAI_FN void lunai_sparse_gather_task(void *work, int64_t thread, int64_t threads) {
  const lunai_sparse_work *w = (const lunai_sparse_work *)work;
  const lunai_attention *a = w->a;
  int64_t i;
  for (i = 0; i < w->count; i++) {
    const lunai_sparse_part *p = &w->parts[i];
    if (!p->direct)
      lunai_sparse_add(w, thread, threads, p->run.width, p->run.row, 1, a->head_dim, p->q,
                       lunai_offset(a->grad_q, p->s.q), a->q_row);
    lunai_sparse_add(w, thread, threads, p->n, &p->key->row, LUNAI_KEYS_APART, a->head_dim, p->k,
                     lunai_offset(a->grad_k, p->s.k), a->k_row);
    lunai_sparse_add(w, thread, threads, p->n, &p->key->row, LUNAI_KEYS_APART, a->value_dim, p->v,
                     lunai_offset(a->grad_v, p->s.v), a->v_row);
  }
}
LUNAI_FN void lunai_run_sparse_backward(const lunai_kernels *kernels, const lunai_attention *a,
                                        const lunai_parallel *parallel, void *scratch) {
  lunai_sparse_work w;
  lunai_sparse_start(&w, kernels, a, lunai_threads(parallel), true, scratch);
  do {
    for (w.count = 0; w.count < w.wave && lunai_sparse_next_part(&w, &w.parts[w.count]); w.count++);
    lunai_run(parallel, lunai_sparse_backward_task, &w);
    lunai_run(parallel, lunai_sparse_gather_task, &w);
  } while (w.count == w.wave);
}
#undef LUNAI_KEYS_APART
#endif

/* ---- the folded unpack: row panels of 64 against all heads' slots at once ---- */
#ifndef LUNAI_PASS
/* The reference. A row's probabilities p [heads, slots] before dropout, from its log-sum-exps once these are known [eq.
   4] */
LUNAI_FN int64_t lunai_unpack_slots(const lunai_unpack *u, int64_t b) {
  return u->lengths ? lunai_max(0, lunai_min(u->lengths[b], u->slots)) : u->slots;
}
LUNAI_FN void lunai_unpack_row(const lunai_unpack *u, int64_t b, int64_t i, bool backward, float *p) {
  const int64_t slots = lunai_unpack_slots(u, b), row = b * u->rows + i;
  int64_t h, l;
  for (h = 0; h < u->heads; h++) {
    const int64_t at = (b * u->heads + h) * u->slots;
    float max = -(float)INFINITY, lse;
    double sum = 0;
    for (l = 0; l < slots; l++) {
      float *s = p + h * u->slots + l;
      *s = (float)(lunai_inner(u->dim, u->x + row * u->dim, 1, u->k + (at + l) * u->dim, 1) + (double)u->bias[at + l]);
      if (!(*s <= max)) max = *s;
    }
    for (l = 0; l < slots; l++) sum += (double)lunai_exp1_scalar(p[h * u->slots + l] - max);
    lse = backward ? u->lse[row * u->heads + h] : slots > 0 ? max + lunai_log1_scalar((float)sum) : 0;
    for (l = 0; l < slots; l++) p[h * u->slots + l] = lunai_exp1_scalar(p[h * u->slots + l] - lse);
    if (!backward && u->lse) u->lse[row * u->heads + h] = lse;
  }
}
LUNAI_FN float lunai_unpack_mask_at(const lunai_unpack *u, int64_t b, int64_t h, int64_t i, int64_t l) {
  return lunai_dropout_at(&u->dropout, ((b * u->heads + h) * u->rows + i) * u->slots + l);
}
LUNAI_FN void lunai_unpack_reference(const lunai_unpack *u, const lunai_parallel *parallel, void *scratch) {
  float *p = (float *)scratch;
  int64_t b, i, h, l, e;
  (void)parallel;
  for (b = 0; b < u->batch; b++)
    for (i = 0; i < u->rows; i++) {
      const int64_t row = (b * u->rows + i) * u->dim, slots = lunai_unpack_slots(u, b);
      lunai_unpack_row(u, b, i, false, p);
      for (h = 0; h < u->heads; h++)
        for (l = 0; l < slots; l++) p[h * u->slots + l] *= lunai_unpack_mask_at(u, b, h, i, l);
      for (e = 0; e < u->dim; e++) {
        double sum = u->out_bias ? (double)u->out_bias[e] : 0;
        for (h = 0; h < u->heads; h++)
          sum += lunai_inner(slots, p + h * u->slots, 1, u->v + (b * u->heads + h) * u->slots * u->dim + e, u->dim);
        u->out[row + e] = (u->residual ? u->residual[row + e] : 0) + (float)sum * lunai_dropout_at(&u->last, row + e);
      }
    }
}
/* dP = m (g . v), dS = P (dP - sum of P dP), g = dOut through its dropout */
LUNAI_FN void lunai_unpack_backward_reference(const lunai_unpack *u, const lunai_parallel *parallel, void *scratch) {
  float *p = (float *)scratch, *g = p + u->heads * u->slots;
  int64_t b, i, h, l, e;
  (void)parallel;
  for (b = 0; b < u->batch; b++)
    for (i = 0; i < u->rows; i++) {
      const int64_t row = (b * u->rows + i) * u->dim, slots = lunai_unpack_slots(u, b);
      lunai_unpack_row(u, b, i, true, p);
      for (e = 0; e < u->dim; e++) g[e] = u->grad_out[row + e] * lunai_dropout_at(&u->last, row + e);
      if (u->grad_out_bias) lunai_add_scaled(u->dim, 1, g, u->grad_out_bias);
      for (h = 0; h < u->heads; h++) {
        const int64_t at = (b * u->heads + h) * u->slots;
        double mean = 0;
        for (l = 0; l < slots; l++)
          mean += (double)p[h * u->slots + l] * (double)lunai_unpack_mask_at(u, b, h, i, l) *
                  lunai_inner(u->dim, g, 1, u->v + (at + l) * u->dim, 1);
        for (l = 0; l < slots; l++) {
          const int64_t slot = (at + l) * u->dim;
          const double prob = (double)p[h * u->slots + l], mask = (double)lunai_unpack_mask_at(u, b, h, i, l);
          const double ds = prob * (mask * lunai_inner(u->dim, g, 1, u->v + slot, 1) - mean);
          if (u->grad_bias) u->grad_bias[at + l] += (float)ds;
          if (u->grad_k) lunai_add_scaled(u->dim, ds, u->x + row, u->grad_k + slot);
          if (u->grad_v) lunai_add_scaled(u->dim, prob * mask, g, u->grad_v + slot);
          if (u->grad_x) lunai_add_scaled(u->dim, ds, u->k + slot, u->grad_x + row); /* may be grad_out: g is a copy */
        }
      }
    }
}
LUNAI_FN size_t lunai_unpack_scratch_reference(const lunai_unpack *u, int64_t threads, bool backward) {
  (void)threads, (void)backward;
  return (size_t)lunai_floats(u->heads * u->slots + u->dim);
}
#endif

#ifdef LUNAI_PASS_LOOPS
/* a group's scores s (+ bias) become its softmax; returns the log-sum-exp */
LUNAI_INLINE float LUNAI_K(group_softmax)(int64_t n, const float *bias, float *s) {
  const vf lowest = vf_set(-INFINITY);
  vf top = lowest, sum = vf_zero(), factor;
  int64_t i;
  for (i = 0; i < n; i += VF)
    top = vf_max(top, vf_add(LUNAI_K(get_filled)(s + i, n - i, lowest), LUNAI_K(get)(bias + i, n - i)));
  top = vf_set(vf_hmax(top));
  for (i = 0; i < n; i += VF) {
    const vf x = vf_exp(vf_sub(vf_add(LUNAI_K(get_filled)(s + i, n - i, lowest), LUNAI_K(get)(bias + i, n - i)), top));
    sum = vf_add(sum, x);
    LUNAI_K(put)(s + i, x, n - i);
  }
  sum = vf_set(vf_sum(sum));
  factor = vf_div(vf_set(1), sum);
  for (i = 0; i < n; i += VF) LUNAI_K(put)(s + i, vf_mul(LUNAI_K(get)(s + i, n - i), factor), n - i);
  return vf_first(vf_add(top, vf_log(sum)));
}

/* the same for [rows, groups] of them, all dense; lse [rows, groups] or null */
LUNAI_FN void LUNAI_K(unpack_softmax)(int64_t rows, int64_t groups, int64_t n, const float *bias, float *s,
                                      float *lse) {
  int64_t i, h;
  for (i = 0; i < rows; i++)
    for (h = 0; h < groups; h++, s += n) {
      const float natural = n ? LUNAI_K(group_softmax)(n, bias + h * n, s) : 0;
      if (lse) lse[i * groups + h] = natural;
    }
}

/* a group's scores s become P m, its slopes dP become dS = P (dP m - sum of P dP m) */
LUNAI_INLINE void LUNAI_K(group_slopes)(int64_t n, const float *bias, const float *mask, float lse, float *s,
                                        float *slopes) {
  vf delta = vf_zero();
  int64_t i;
  for (i = 0; i < n; i += VF) {
    const vf p = vf_exp(vf_sub(vf_add(LUNAI_K(get)(s + i, n - i), LUNAI_K(get)(bias + i, n - i)), vf_set(lse)));
    vf g = LUNAI_K(get)(slopes + i, n - i);
    if (mask) g = vf_mul(g, LUNAI_K(get)(mask + i, n - i));
    delta = vf_fma(p, g, delta);
    LUNAI_K(put)(s + i, p, n - i);
    LUNAI_K(put)(slopes + i, g, n - i);
  }
  delta = vf_set(vf_sum(delta));
  for (i = 0; i < n; i += VF) {
    const vf p = LUNAI_K(get)(s + i, n - i);
    LUNAI_K(put)(slopes + i, vf_mul(p, vf_sub(LUNAI_K(get)(slopes + i, n - i), delta)), n - i);
    if (mask) LUNAI_K(put)(s + i, vf_mul(p, LUNAI_K(get)(mask + i, n - i)), n - i);
  }
}

LUNAI_FN void LUNAI_K(unpack_slopes)(int64_t rows, int64_t groups, int64_t n, const float *bias, const float *mask,
                                     const float *lse, float *s, float *slopes) {
  int64_t i, h;
  for (i = 0; i < rows; i++)
    for (h = 0; h < groups; h++, s += n, slopes += n) {
      LUNAI_K(group_slopes)(n, bias + h * n, mask, lse[i * groups + h], s, slopes);
      if (mask) mask += n;
    }
}

#elif !defined(LUNAI_PASS)
typedef struct lunai_unpack_work {
  const lunai_kernels *kernels;
  const lunai_unpack *u;
  char *scratch;
  size_t thread_bytes;
  /* blocks of LUNAI_KEY_BLOCK rows; backward: units (batch row, block) of this wave */
  int64_t blocks, first, last, unit;
  /* of each: dK and dV [heads slots, dim], dbias [heads slots], dout_bias [dim] */
  float *partial;
} lunai_unpack_work;

/* The K and V of one batch row, its real slots close together; each thread makes panels of its own. */
typedef struct lunai_unpack_space {
  int64_t slots, n;                     /* real slots; heads of them */
  float *k, *v, *bias, *score_panels, *out_panels, *dx_panels, *slope_panels; /* K, V; K, V for backward */
  float *scores, *slopes, *mask, *product, *grad; /* grad: a panel of out's, through its dropout */
} lunai_unpack_space;

LUNAI_FN char *lunai_unpack_layout(const lunai_kernels *kernels, const lunai_unpack *u, bool backward, char *scratch,
                                   lunai_unpack_space *m) {
  const int64_t n = u->heads * u->slots, back = backward ? 1 : 0;
  m->k = lunai_take(&scratch, u->lengths ? n * u->dim : 0);
  m->v = lunai_take(&scratch, u->lengths ? n * u->dim : 0);
  m->bias = lunai_take(&scratch, n);
  m->score_panels = lunai_take(&scratch, lunai_panels_size(kernels, n, u->dim));
  m->out_panels = lunai_take(&scratch, back ? 0 : lunai_panels_size(kernels, u->dim, n));
  m->dx_panels = lunai_take(&scratch, back * lunai_panels_size(kernels, u->dim, n));
  m->slope_panels = lunai_take(&scratch, back * lunai_panels_size(kernels, n, u->dim));
  m->scores = lunai_take(&scratch, LUNAI_TILE * n);
  m->slopes = lunai_take(&scratch, back * LUNAI_TILE * n);
  m->mask = lunai_take(&scratch, u->dropout.threshold ? LUNAI_TILE * n : 0);
  m->product = lunai_take(&scratch, back * lunai_panels_size(kernels, u->dim, LUNAI_TILE));
  m->grad = lunai_take(&scratch, u->last.threshold ? back * LUNAI_TILE * u->dim : 0);
  return scratch;
}

LUNAI_FN size_t lunai_unpack_start(lunai_unpack_work *w, const lunai_kernels *kernels, const lunai_unpack *u,
                                   int64_t threads, bool backward, void *scratch) {
  lunai_unpack_space space;
  char *zero = (char *)w; /* only distances count */
  memset(w, 0, sizeof *w);
  w->kernels = kernels;
  w->u = u;
  w->scratch = (char *)scratch;
  w->thread_bytes = (size_t)(lunai_unpack_layout(kernels, u, backward, zero, &space) - zero);
  w->blocks = lunai_divide_up(u->rows, LUNAI_KEY_BLOCK);
  w->unit = backward ? u->heads * u->slots * (2 * u->dim + 1) + u->dim : 0;
  if (scratch) w->partial = (float *)(void *)(w->scratch + (size_t)threads * w->thread_bytes);
  return (size_t)threads * w->thread_bytes + (size_t)lunai_floats(2 * threads * w->unit);
}

LUNAI_FN size_t lunai_unpack_scratch(const lunai_kernels *kernels, const lunai_unpack *u, int64_t threads,
                                     bool backward) {
  lunai_unpack_work w;
  return lunai_unpack_start(&w, kernels, u, lunai_max(threads, 1), backward, NULL);
}

LUNAI_FN void lunai_unpack_prepare(const lunai_kernels *kernels, const lunai_unpack *u, int64_t b, bool backward,
                                   lunai_unpack_space *m) {
  const int64_t at = b * u->heads * u->slots, d = u->dim;
  const float *k = u->k + at * d, *v = u->v + at * d;
  int64_t h;
  m->slots = lunai_unpack_slots(u, b);
  m->n = u->heads * m->slots;
  for (h = 0; h < u->heads; h++)
    memcpy(m->bias + h * m->slots, u->bias + at + h * u->slots, (size_t)m->slots * sizeof(float));
  if (m->slots < u->slots) {
    for (h = 0; h < u->heads; h++) {
      memcpy(m->k + h * m->slots * d, k + h * u->slots * d, (size_t)(m->slots * d) * sizeof(float));
      memcpy(m->v + h * m->slots * d, v + h * u->slots * d, (size_t)(m->slots * d) * sizeof(float));
    }
    k = m->k;
    v = m->v;
  }
  kernels->fill_panels(m->n, d, k, 1, d, m->score_panels);
  if (!backward) kernels->fill_panels(d, m->n, v, d, 1, m->out_panels);
  else {
    kernels->fill_panels(d, m->n, k, d, 1, m->dx_panels);
    kernels->fill_panels(m->n, d, v, 1, d, m->slope_panels);
  }
}

/* keep or 0 for each score of a panel of rows */
LUNAI_FN void lunai_unpack_mask(const lunai_kernels *kernels, const lunai_unpack *u, const lunai_unpack_space *m,
                                int64_t b, int64_t first, int64_t rows) {
  int64_t i, h;
  for (i = 0; i < rows; i++)
    for (h = 0; h < u->heads; h++)
      kernels->dropout_mask(&u->dropout, ((b * u->heads + h) * u->rows + first + i) * u->slots, m->slots,
                            m->mask + i * m->n + h * m->slots);
}

LUNAI_FN void lunai_unpack_panel(const lunai_kernels *kernels, const lunai_unpack *u, const lunai_unpack_space *m,
                                 int64_t b, int64_t first, int64_t rows) {
  const int64_t d = u->dim, row = b * u->rows + first;
  float *out = u->out + row * d;
  int64_t i;
  lunai_matmul_panels(kernels, rows, m->n, d, u->x + row * d, d, 1, m->score_panels, 1, m->scores, m->n, false);
  kernels->unpack_softmax(rows, u->heads, m->slots, m->bias, m->scores, u->lse ? u->lse + row * u->heads : NULL);
  if (u->dropout.threshold) {
    lunai_unpack_mask(kernels, u, m, b, first, rows);
    kernels->mul(rows * m->n, m->scores, m->mask, m->scores);
  }
  for (i = 0; i < rows; i++) {
    const float *residual = u->residual && !u->last.threshold ? u->residual + (row + i) * d : NULL;
    if (residual && u->out_bias) kernels->add(d, residual, u->out_bias, out + i * d);
    else if (residual || u->out_bias) memcpy(out + i * d, residual ? residual : u->out_bias, (size_t)d * sizeof(float));
  }
  lunai_matmul_panels(kernels, rows, d, m->n, m->scores, m->n, 1, m->out_panels, 1, out, d, u->out_bias ||
                      (u->residual && !u->last.threshold));
  if (!u->last.threshold) return;
  kernels->dropout(&u->last, row * d, rows * d, out, out, false);
  if (u->residual) kernels->add(rows * d, u->residual + row * d, out, out);
}

LUNAI_FN void lunai_unpack_task(void *work, int64_t thread, int64_t threads) {
  const lunai_unpack_work *w = (const lunai_unpack_work *)work;
  const lunai_kernels *kernels = w->kernels;
  const lunai_unpack *u = w->u;
  const int64_t panels = lunai_divide_up(u->rows, LUNAI_TILE);
  const int64_t last = lunai_share(u->batch * panels, thread + 1, threads);
  lunai_unpack_space space;
  int64_t item = lunai_share(u->batch * panels, thread, threads), prepared = -1;
  lunai_unpack_layout(kernels, u, false, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (; item < last; item++) {
    const int64_t first = item % panels * LUNAI_TILE;
    if (item / panels != prepared) lunai_unpack_prepare(kernels, u, prepared = item / panels, false, &space);
    lunai_unpack_panel(kernels, u, &space, prepared, first, lunai_min(LUNAI_TILE, u->rows - first));
  }
}

LUNAI_FN void lunai_run_unpack(const lunai_kernels *kernels, const lunai_unpack *u, const lunai_parallel *parallel,
                               void *scratch) {
  lunai_unpack_work w;
  lunai_unpack_start(&w, kernels, u, lunai_threads(parallel), false, scratch);
  lunai_run(parallel, lunai_unpack_task, &w);
}

/* a panel's dX, and its share of the unit's partial gradients */
LUNAI_FN void lunai_unpack_backward_panel(const lunai_kernels *kernels, const lunai_unpack *u,
                                          const lunai_unpack_space *m, int64_t b, int64_t first, int64_t rows,
                                          float *part) {
  const int64_t d = u->dim, n = m->n, row = b * u->rows + first;
  const float *x = u->x + row * d, *grad = u->grad_out + row * d, *mask = u->dropout.threshold ? m->mask : NULL;
  float *bias = part + 2 * n * d;
  int64_t i;
  if (u->last.threshold) {
    kernels->dropout(&u->last, row * d, rows * d, grad, m->grad, false);
    grad = m->grad;
  }
  lunai_matmul_panels(kernels, rows, n, d, x, d, 1, m->score_panels, 1, m->scores, n, false);
  lunai_matmul_panels(kernels, rows, n, d, grad, d, 1, m->slope_panels, 1, m->slopes, n, false);
  if (mask) lunai_unpack_mask(kernels, u, m, b, first, rows);
  kernels->unpack_slopes(rows, u->heads, m->slots, m->bias, mask, u->lse + row * u->heads, m->scores, m->slopes);
  for (i = 0; i < rows; i++) {
    kernels->add(n, bias, m->slopes + i * n, bias);
    kernels->add(d, bias + n, grad + i * d, bias + n);
  }
  if (u->grad_k) lunai_matmul(kernels, n, d, rows, m->slopes, 1, n, x, d, 1, 1, part, d, true, m->product);
  if (u->grad_v) lunai_matmul(kernels, n, d, rows, m->scores, 1, n, grad, d, 1, 1, part + n * d, d, true, m->product);
  /* last: it may be grad_out */
  if (u->grad_x) lunai_matmul_panels(kernels, rows, d, n, m->slopes, n, 1, m->dx_panels, 1, u->grad_x + row * d, d,
                                     true);
}

LUNAI_FN void lunai_unpack_backward_task(void *work, int64_t thread, int64_t threads) {
  const lunai_unpack_work *w = (const lunai_unpack_work *)work;
  const lunai_kernels *kernels = w->kernels;
  const lunai_unpack *u = w->u;
  const int64_t last = w->first + lunai_share(w->last - w->first, thread + 1, threads);
  lunai_unpack_space space;
  int64_t unit = w->first + lunai_share(w->last - w->first, thread, threads), prepared = -1, row;
  lunai_unpack_layout(kernels, u, true, w->scratch + (size_t)thread * w->thread_bytes, &space);
  for (; unit < last; unit++) {
    const int64_t b = unit / w->blocks, first = unit % w->blocks * LUNAI_KEY_BLOCK,
        end = lunai_min(first + LUNAI_KEY_BLOCK, u->rows);
    float *part = w->partial + (unit - w->first) * w->unit;
    if (b != prepared) lunai_unpack_prepare(kernels, u, prepared = b, true, &space);
    memset(part, 0, (size_t)w->unit * sizeof(float));
    for (row = first; row < end; row += LUNAI_TILE)
      lunai_unpack_backward_panel(kernels, u, &space, b, row, lunai_min(LUNAI_TILE, end - row), part);
  }
}

/* adds this wave's partial gradients in order; items: each memory slot of each head, and dout_bias */
LUNAI_FN void lunai_unpack_gather_task(void *work, int64_t thread, int64_t threads) {
  const lunai_unpack_work *w = (const lunai_unpack_work *)work;
  const lunai_kernels *kernels = w->kernels;
  const lunai_unpack *u = w->u;
  const int64_t d = u->dim, items = u->heads * u->slots;
  int64_t item, unit;
  for (item = thread; item <= items; item += threads)
    for (unit = w->first; unit < w->last; unit++) {
      const int64_t b = unit / w->blocks, real = lunai_unpack_slots(u, b), n = u->heads * real, at = b * items + item;
      const float *part = w->partial + (unit - w->first) * w->unit;
      const int64_t from = item < items ? item / u->slots * real + item % u->slots : 0;
      if (item == items) {
        if (u->grad_out_bias) kernels->add(d, u->grad_out_bias, part + 2 * n * d + n, u->grad_out_bias);
      } else if (item % u->slots < real) {
        if (u->grad_k) kernels->add(d, u->grad_k + at * d, part + from * d, u->grad_k + at * d);
        if (u->grad_v) kernels->add(d, u->grad_v + at * d, part + (n + from) * d, u->grad_v + at * d);
        if (u->grad_bias) u->grad_bias[at] += part[2 * n * d + from];
      }
    }
}

LUNAI_FN void lunai_run_unpack_backward(const lunai_kernels *kernels, const lunai_unpack *u,
                                        const lunai_parallel *parallel, void *scratch) {
  const int64_t threads = lunai_threads(parallel), units = u->batch * lunai_divide_up(u->rows, LUNAI_KEY_BLOCK);
  lunai_unpack_work w;
  lunai_unpack_start(&w, kernels, u, threads, true, scratch);
  for (; w.first < units; w.first = w.last) {
    w.last = lunai_min(w.first + 2 * threads, units);
    lunai_run(parallel, lunai_unpack_backward_task, &w);
    lunai_run(parallel, lunai_unpack_gather_task, &w);
  }
}
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>causal: the causal product and causal Luna, forward and backward, in chunks of LUNAI_CHUNK rows [section 3.3]
     F = diag(1/t) [X_c S + ((X_c Y_c^T) o L) Z_c],   S <- S + Y_c^T Z_c
   The state between chunks is double: S forward, as the running mean M = S / t, and R in reverse; inside a chunk all is
   float. A chunk's outputs depend on its rows and on the state before it alone, and states are summed in chunk order,
   so the bits are the same whether one thread sweeps a head or many share its chunks. Guarded by tests/causal.c
   ------------------------------------------------------------------------------------------------------------------ */
#ifndef LUNAI_PASS
/* ---- the reference ---- */

/* out_t = (1/t) sum_{j<=t} (x_t . y_j) z_j [eq. 7]; columns of z by sixty-fours, whose sums are kept in double */
LUNAI_FN void lunai_causal_reference(const lunai_causal *c, const lunai_parallel *parallel, void *scratch) {
  int64_t item, t, j, e, first;
  (void)parallel, (void)scratch;
  for (item = 0; item < c->batch * c->heads; item++) {
    const int64_t xy = item / c->heads * c->xy_batch + item % c->heads * c->xy_head;
    const int64_t z = item / c->heads * c->z_batch + item % c->heads * c->z_head;
    for (t = 0; t < c->rows; t++)
      for (first = 0; first < c->value_dim; first += 64) {
        const int64_t n = lunai_min(64, c->value_dim - first);
        double sum[64] = {0};
        for (j = 0; j <= t; j++) {
          const double score = lunai_inner(c->dim, c->x + xy + t * c->xy_row, 1, c->y + xy + j * c->xy_row, 1);
          for (e = 0; e < n; e++) sum[e] += score * (double)c->z[z + j * c->z_row + first + e];
        }
        for (e = 0; e < n; e++) c->out[z + t * c->z_row + first + e] = (float)(sum[e] / (double)(t + 1));
      }
  }
}
LUNAI_FN void lunai_causal_backward_reference(const lunai_causal *c, const lunai_parallel *parallel, void *scratch) {
  int64_t item, t, j;
  (void)parallel, (void)scratch;
  for (item = 0; item < c->batch * c->heads; item++)
    for (t = 0; t < c->rows; t++)
      for (j = 0; j <= t; j++) {
        const int64_t xy = item / c->heads * c->xy_batch + item % c->heads * c->xy_head, x = xy + t * c->xy_row,
                      y = xy + j * c->xy_row;
        const int64_t head = item / c->heads * c->z_batch + item % c->heads * c->z_head, z = head + j * c->z_row;
        const float *g = c->grad_out + head + t * c->z_row;
        const double score = lunai_inner(c->dim, c->x + x, 1, c->y + y, 1) / (double)(t + 1);
        const double slope = lunai_inner(c->value_dim, g, 1, c->z + z, 1) / (double)(t + 1);
        if (c->grad_x) lunai_add_scaled(c->dim, slope, c->y + y, c->grad_x + x);
        if (c->grad_y) lunai_add_scaled(c->dim, slope, c->x + x, c->grad_y + y);
        if (c->grad_z) lunai_add_scaled(c->value_dim, score, g, c->grad_z + z);
      }
}

LUNAI_INLINE int64_t lunai_real_slots(const int32_t *lengths, int64_t b, int64_t slots) {
  return lengths ? lunai_max(0, lunai_min(lengths[b], slots)) : slots;
}
/* M [dim, n] += (y^T z - M) / t, result = x M, both in double */
LUNAI_FN void lunai_mean_step(int64_t t, int64_t dim, int64_t n, const float *y, const float *z, const float *x,
                              double *mean, int64_t mean_row, double factor, float *result) {
  int64_t i, j;
  for (j = 0; j < n; j++) {
    double sum = 0;
    for (i = 0; i < dim; i++) {
      double *m = mean + i * mean_row + j;
      *m += ((double)y[i] * (double)z[j] - *m) / (double)t;
      sum += (double)x[i] * *m;
    }
    result[j] = (float)(factor * sum);
  }
}
/* u_t = scale q_t mean(k^T A), w = softmax(u), out_t = w_t mean(A^T v) over the tokens so far, A = omega(s) [section
   3.3] */
LUNAI_FN void lunai_causal_luna_reference(const lunai_causal_luna *a, const lunai_parallel *parallel, void *scratch) {
  const int64_t d = a->head_dim, state = d * a->slots;
  double *means = (double *)scratch;
  float *omega = (float *)(void *)(means + 2 * state), *w = omega + a->slots;
  int64_t item, t, l;
  (void)parallel;
  for (item = 0; item < a->batch * a->heads; item++) {
    const int64_t real = lunai_real_slots(a->lengths, item / a->heads, a->slots);
    double *ka = a->mean_ka ? a->mean_ka + item * state : means, *av = a->mean_ka ? a->mean_av + item * state : means +
        state;
    for (l = 0; a->position == 0 && l < state; l++) ka[l] = av[l] = 0;
    for (t = 0; t < a->rows; t++) {
      const int64_t row = (item / a->heads * a->rows + t) * a->heads + item % a->heads, wide = row * d,
                    narrow = row * a->slots;
      lunai_activate_reference(a->activation, real, a->s + narrow, omega);
      lunai_mean_step(a->position + t + 1, d, real, a->k + wide, omega, a->q + wide, ka, a->slots, (double)a->scale, w);
      lunai_softmax_reference(1, real, w, w);
      lunai_mean_step(a->position + t + 1, real, d, omega, a->v + wide, w, av, d, 1, a->out + wide);
      for (l = 0; a->w && l < a->slots; l++) a->w[narrow + l] = l < real ? w[l] : 0;
    }
  }
}
/* With g_t = dOut_t / t and h_t = scale / t dU_t, sums over j <= t:
   dW_t = sum (g_t . v_j) A_j, dU = softmax's backward; dv_j += (w_t . A_j) g_t, dq_t += (h_t . A_j) k_j,
       dk_j += (h_t . A_j) q_t,
   dA_j += (g_t . v_j) w_t + (q_t . k_j) h_t */
LUNAI_FN void lunai_causal_luna_row_backward(const lunai_causal_luna *a, int64_t first, int64_t t, int64_t real,
                                             const float *omega, float *domega, float *dw, float *h) {
  const int64_t d = a->head_dim, row = first + t * a->heads;
  const float *g = a->grad_out + row * d, *w = a->w + row * a->slots, *q = a->q + row * d;
  const double share = 1 / (double)(t + 1);
  int64_t j, l;
  for (l = 0; l < real; l++) dw[l] = h[l] = 0;
  for (j = 0; j <= t; j++)
    lunai_add_scaled(real, share * lunai_inner(d, g, 1, a->v + (first + j * a->heads) * d, 1), omega + j * a->slots,
                     dw);
  lunai_softmax_backward_reference(1, real, w, dw, h);
  for (l = 0; l < real; l++) h[l] = (float)((double)a->scale * share * (double)h[l]);
  for (j = 0; j <= t; j++) {
    const int64_t at = (first + j * a->heads) * d;
    const double ha = lunai_inner(real, h, 1, omega + j * a->slots, 1),
                 wa = lunai_inner(real, w, 1, omega + j * a->slots, 1);
    if (a->grad_q) lunai_add_scaled(d, ha, a->k + at, a->grad_q + row * d);
    if (a->grad_k) lunai_add_scaled(d, ha, q, a->grad_k + at);
    if (a->grad_v) lunai_add_scaled(d, share * wa, g, a->grad_v + at);
    lunai_add_scaled(real, share * lunai_inner(d, g, 1, a->v + at, 1), w, domega + j * a->slots);
    lunai_add_scaled(real, lunai_inner(d, q, 1, a->k + at, 1), h, domega + j * a->slots);
  }
}
LUNAI_FN void lunai_causal_luna_backward_reference(const lunai_causal_luna *a, const lunai_parallel *parallel,
                                                   void *scratch) {
  float *omega = (float *)scratch, *domega = omega + a->rows * a->slots, *dw = domega + a->rows * a->slots,
      *h = dw + a->slots;
  int64_t item, t;
  (void)parallel;
  for (item = 0; item < a->batch * a->heads; item++) {
    const int64_t real = lunai_real_slots(a->lengths, item / a->heads, a->slots);
    const int64_t first = item / a->heads * a->rows * a->heads + item % a->heads, step = a->heads * a->slots;
    const float *s = a->s + first * a->slots;
    memset(domega, 0, (size_t)(a->rows * a->slots) * sizeof(float));
    for (t = 0; t < a->rows; t++) lunai_activate_reference(a->activation, real, s + t * step, omega + t * a->slots);
    for (t = 0; t < a->rows; t++) lunai_causal_luna_row_backward(a, first, t, real, omega, domega, dw, h);
    for (t = 0; a->grad_s && t < a->rows; t++)
      lunai_activate_backward_reference(a->activation, real, s + t * step, domega + t * a->slots,
                                        a->grad_s + first * a->slots + t * step);
  }
}
LUNAI_FN size_t lunai_causal_luna_scratch_reference(const lunai_causal_luna *a, int64_t threads, bool backward) {
  (void)threads;
  if (backward) return (size_t)lunai_floats(2 * (a->rows + 1) * a->slots);
  return lunai_round((size_t)(2 * a->head_dim * a->slots) * sizeof(double)) + (size_t)lunai_floats(2 * a->slots);
}
#endif

#ifdef LUNAI_PASS_LOOPS

/* The state before the chunk replaces the chunk's sum, which is added to the state. Strips of constant length and
   one operation a loop let compilers vectorise this at -O2. */
#undef LUNAI_STRIP
#define LUNAI_STRIP 64
LUNAI_INLINE void LUNAI_K(scan_strip)(int64_t n, double joins, double leaves, float *state, double *carried) {
  double sum[LUNAI_STRIP];
  int64_t i;
  for (i = 0; i < n; i++) sum[i] = (double)state[i];
  for (i = 0; i < n; i++) state[i] = (float)carried[i];
  for (i = 0; i < n; i++) carried[i] += joins * sum[i] - leaves * carried[i];
}
LUNAI_FN void LUNAI_K(scan)(int64_t n, double joins, double leaves, float *state, double *carried) {
  int64_t i;
  for (i = 0; i + LUNAI_STRIP <= n; i += LUNAI_STRIP)
    LUNAI_K(scan_strip)(LUNAI_STRIP, joins, leaves, state + i, carried + i);
  if (i < n) LUNAI_K(scan_strip)(n - i, joins, leaves, state + i, carried + i);
}

LUNAI_FN bool LUNAI_K(all_finite)(int64_t rows, int64_t n, const float *x, int64_t x_row) {
  const vf zero = vf_zero();
  vf sum0 = zero, sum1 = zero, sum2 = zero, sum3 = zero; /* of 0 x: 0 as long as every x is finite */
  int64_t t, i;
  for (t = 0; t < rows; t++, x += x_row) {
    for (i = 0; i + 4 * VF <= n; i += 4 * VF) {
      sum0 = vf_fma(vf_load(x + i), zero, sum0);
      sum1 = vf_fma(vf_load(x + i + VF), zero, sum1);
      sum2 = vf_fma(vf_load(x + i + 2 * VF), zero, sum2);
      sum3 = vf_fma(vf_load(x + i + 3 * VF), zero, sum3);
    }
    for (; i < n; i += VF) sum0 = vf_fma(LUNAI_K(get)(x + i, n - i), zero, sum0);
  }
  return vf_sum(vf_add(vf_add(sum0, sum1), vf_add(sum2, sum3))) == 0;
}

LUNAI_FN void LUNAI_K(copy_rows)(int64_t rows, int64_t n, const float *x, int64_t x_row, float *y, int64_t y_row) {
  int64_t t, i;
  for (t = 0; t < rows; t++, x += x_row, y += y_row)
    for (i = 0; i < n; i += VF) LUNAI_K(put)(y + i, LUNAI_K(get)(x + i, n - i), n - i);
}

/* y = diag(factors) x + 0, which makes -0 to 0 */
LUNAI_FN void LUNAI_K(scale_rows)(int64_t rows, int64_t n, const float *factors, const float *x, int64_t x_row,
                                  float *y, int64_t y_row) {
  int64_t t, i;
  for (t = 0; t < rows; t++, x += x_row, y += y_row) {
    const vf factor = vf_set(factors[t]);
    for (i = 0; i < n; i += VF)
      LUNAI_K(put)(y + i, vf_add(vf_mul(LUNAI_K(get)(x + i, n - i), factor), vf_zero()), n - i);
  }
}

/* n columns of M <- M + (y^T z - M) / t, then result = x M; n is 8, or 1 */
LUNAI_INLINE void LUNAI_K(step_block)(int64_t n, int64_t dim, double share, const float *y, const float *z,
                                      const float *x, double *mean,
                                      int64_t mean_row, double *result) {
  double wide[8], sum[8];
  int64_t i, j;
  for (j = 0; j < n; j++) sum[j] = 0;
  for (j = 0; j < n; j++) wide[j] = (double)z[j];
  for (i = 0; i < dim; i++, mean += mean_row) {
    const double yi = (double)y[i], xi = (double)x[i];
    for (j = 0; j < n; j++) mean[j] += (yi * wide[j] - mean[j]) * share;
    for (j = 0; j < n; j++) sum[j] += xi * mean[j];
  }
  for (j = 0; j < n; j++) result[j] = sum[j];
}
LUNAI_FN void LUNAI_K(step_state)(int64_t dim, int64_t n, double share, const float *y, const float *z, const float *x,
                                  double *mean,
                                  int64_t mean_row, double *result) {
  int64_t j;
  for (j = 0; j + 8 <= n; j += 8) LUNAI_K(step_block)(8, dim, share, y, z + j, x, mean + j, mean_row, result + j);
  for (; j < n; j++) LUNAI_K(step_block)(1, dim, share, y, z + j, x, mean + j, mean_row, result + j);
}

#elif !defined(LUNAI_PASS)

/* one chunk of one (batch, head), and its buffers */
typedef struct lunai_causal_chunk {
  const lunai_kernels *kernels;
  int64_t item, first, rows;
  double before;                     /* tokens before the first row */
  bool begins, last;                 /* the state before it is empty; the state after it is unused */
  float *state, *kept;               /* `sum` writes the chunk's own sum to state, and anything to kept; `output`
                                        reads the state before the chunk, and kept */
  /* [rows, LUNAI_CHUNK]; for products; each [LUNAI_CHUNK, the wider of dim and value_dim] */
  float *scores, *panels, *buffer[3];
} lunai_causal_chunk;

typedef struct lunai_sweep {
  const lunai_kernels *kernels;
  const void *args;
  void (*sum)(const void *args, const lunai_causal_chunk *c);
  void (*output)(const void *args, const lunai_causal_chunk *c);
  /* loads or stores the caller's state; null: starts at 0 */
  void (*exchange)(const void *args, int64_t item, double *state, bool store);
  int64_t items, heads, rows, position, dim, value_dim;
  const int32_t *lengths;            /* [batch] of `slots`; null: all */
  int64_t slots, unit, kept;         /* floats: unit * slots a state, kept a chunk */
  bool reverse;                      /* from the last chunk to the first; the state is a sum, not a mean */
  /* chunks of every item in flight between two barriers; 1: none, each thread sweeps items of its own */
  int64_t chunks, window, start;
  int64_t thread_bytes, state_bytes, record_bytes;
  char *threads_at, *state_at, *record_at;
} lunai_sweep;

/* threads, when the work is worth waking them */
LUNAI_INLINE const lunai_parallel *lunai_worth(const lunai_parallel *parallel, int64_t products) {
  return products >= (int64_t)1 << 18 ? parallel : NULL;
}

/* floats of panels for any product between a chunk's rows, dim and value_dim */
LUNAI_FN int64_t lunai_chunk_panels(const lunai_kernels *kernels, int64_t dim, int64_t value_dim) {
  const int64_t size[3] = {LUNAI_CHUNK, dim, value_dim};
  int64_t max = lunai_panels_size(kernels, LUNAI_CHUNK, LUNAI_CHUNK);
  int i, j;
  for (i = 0; i < 3; i++)
    for (j = 0; j < 3; j++)
      if (i != j) max = lunai_max(max, lunai_panels_size(kernels, size[i], size[j]));
  return max;
}

/* lays the sweep out in `memory` (null: only counts); returns its bytes */
LUNAI_FN size_t lunai_sweep_plan(lunai_sweep *s, int64_t threads, void *memory) {
  const int64_t wide = lunai_max(s->dim, s->value_dim), state = s->unit * s->slots;
  int64_t states, records;
  s->chunks = lunai_divide_up(s->rows, LUNAI_CHUNK);
  s->window = 1;
  /* else whole items keep the threads busy */
  if (s->chunks > 1 && s->items > 0 && threads > 1 && s->items % threads != 0 && s->items < 8 * threads)
    s->window = lunai_min(s->chunks, lunai_divide_up(16 * threads, s->items));
  states = s->window > 1 ? s->items : threads;
  records = s->window > 1 ? s->items * s->window : threads;
  s->thread_bytes = lunai_floats(LUNAI_CHUNK * LUNAI_CHUNK) +
                    lunai_floats(lunai_chunk_panels(s->kernels, s->dim, s->value_dim)) +
                  3 * lunai_floats(LUNAI_CHUNK * wide);
  s->state_bytes = (int64_t)lunai_round((size_t)state * sizeof(double));
  s->record_bytes = lunai_floats(state) + lunai_floats(s->kept);
  if (memory) {
    s->threads_at = (char *)memory;
    s->state_at = s->threads_at + threads * s->thread_bytes;
    s->record_at = s->state_at + states * s->state_bytes;
  }
  return (size_t)(threads * s->thread_bytes + states * s->state_bytes + records * s->record_bytes);
}

LUNAI_INLINE int64_t lunai_sweep_state(const lunai_sweep *s, int64_t item) {
  return s->unit * lunai_real_slots(s->lengths, item / s->heads, s->slots);
}
LUNAI_INLINE double *lunai_sweep_carried(const lunai_sweep *s, int64_t place) {
  return (double *)(void *)(s->state_at + place * s->state_bytes);
}

/* the k-th chunk of an item in the sweep's order, with the record at `place` and the buffers of `thread` */
LUNAI_FN lunai_causal_chunk lunai_sweep_chunk(const lunai_sweep *s, int64_t item, int64_t k, int64_t place,
                                              int64_t thread) {
  const int64_t wide = LUNAI_CHUNK * lunai_max(s->dim, s->value_dim);
  char *record = s->record_at + place * s->record_bytes, *buffer = s->threads_at + thread * s->thread_bytes;
  lunai_causal_chunk c;
  int i;
  c.kernels = s->kernels;
  c.item = item;
  c.first = (s->reverse ? s->chunks - 1 - k : k) * LUNAI_CHUNK;
  c.rows = lunai_min(LUNAI_CHUNK, s->rows - c.first);
  c.before = (double)(s->position + c.first);
  c.begins = k == 0 && s->position == 0;
  c.last = k == s->chunks - 1 && !s->exchange;
  c.state = lunai_take(&record, s->unit * s->slots);
  c.kept = lunai_take(&record, s->kept);
  c.scores = lunai_take(&buffer, LUNAI_CHUNK * LUNAI_CHUNK);
  c.panels = lunai_take(&buffer, lunai_chunk_panels(s->kernels, s->dim, s->value_dim));
  for (i = 0; i < 3; i++) c.buffer[i] = lunai_take(&buffer, wide);
  return c;
}

LUNAI_FN void lunai_sweep_scan(const lunai_sweep *s, const lunai_causal_chunk *c, double *carried, int64_t first,
                               int64_t end) {
  const double t = c->before + (double)c->rows;
  const double joins = s->reverse ? 1 : 1 / t, leaves = s->reverse ? 0 : (double)c->rows / t;
  int64_t i;
  for (i = first; c->last && i < end; i++) c->state[i] = (float)carried[i];
  if (i < end) s->kernels->scan(end - i, joins, leaves, c->state + i, carried + i);
}

LUNAI_FN void lunai_sweep_start(const lunai_sweep *s, int64_t item, double *carried) {
  if (s->exchange && s->position > 0) s->exchange(s->args, item, carried, false);
  else memset(carried, 0, (size_t)lunai_sweep_state(s, item) * sizeof(double));
}

/* each thread sweeps whole items */
LUNAI_FN void lunai_sweep_items(void *work, int64_t thread, int64_t threads) {
  const lunai_sweep *s = (const lunai_sweep *)work;
  const int64_t end = lunai_share(s->items, thread + 1, threads);
  double *carried = lunai_sweep_carried(s, thread);
  int64_t item, k;
  for (item = lunai_share(s->items, thread, threads); item < end; item++) {
    lunai_sweep_start(s, item, carried);
    for (k = 0; k < s->chunks; k++) {
      const lunai_causal_chunk c = lunai_sweep_chunk(s, item, k, thread, thread);
      s->sum(s->args, &c);
      lunai_sweep_scan(s, &c, carried, 0, lunai_sweep_state(s, item));
      s->output(s->args, &c);
    }
    if (s->exchange) s->exchange(s->args, item, carried, true);
  }
}

/* or the threads share a window of chunks: their sums, the scan (each thread its elements of every state), their
   outputs */
LUNAI_INLINE void lunai_sweep_window(const lunai_sweep *s, int64_t thread, int64_t threads, bool output) {
  const int64_t window = lunai_min(s->window, s->chunks - s->start);
  const int64_t end = lunai_share(s->items * window, thread + 1, threads);
  int64_t i;
  for (i = lunai_share(s->items * window, thread, threads); i < end; i++) {
    const lunai_causal_chunk c = lunai_sweep_chunk(s, i / window, s->start + i % window, i, thread);
    if (output) s->output(s->args, &c);
    else s->sum(s->args, &c);
  }
}
LUNAI_FN void lunai_sweep_sums(void *work, int64_t thread, int64_t threads) {
  lunai_sweep_window((const lunai_sweep *)work, thread, threads, false);
}
LUNAI_FN void lunai_sweep_outputs(void *work, int64_t thread, int64_t threads) {
  lunai_sweep_window((const lunai_sweep *)work, thread, threads, true);
}
LUNAI_FN void lunai_sweep_scans(void *work, int64_t thread, int64_t threads) {
  const lunai_sweep *s = (const lunai_sweep *)work;
  const int64_t window = lunai_min(s->window, s->chunks - s->start);
  int64_t i;
  for (i = 0; i < s->items * window; i++) {
    const int64_t item = i / window, n = lunai_sweep_state(s, item);
    const lunai_causal_chunk c = lunai_sweep_chunk(s, item, s->start + i % window, i, thread);
    lunai_sweep_scan(s, &c, lunai_sweep_carried(s, item), lunai_share(n, thread, threads),
                     lunai_share(n, thread + 1, threads));
  }
}

LUNAI_FN void lunai_sweep_run(lunai_sweep *s, const lunai_parallel *parallel, void *scratch) {
  const int64_t work = s->items * s->rows * s->dim * s->value_dim;
  int64_t item;
  parallel = lunai_worth(parallel, work);
  (void)lunai_sweep_plan(s, lunai_threads(parallel), scratch);
  if (lunai_threads(parallel) == 1 || s->window == 1) {
    lunai_run(parallel, lunai_sweep_items, s);
    return;
  }
  for (item = 0; item < s->items; item++) lunai_sweep_start(s, item, lunai_sweep_carried(s, item));
  for (s->start = 0; s->start < s->chunks; s->start += s->window) {
    lunai_run(parallel, lunai_sweep_sums, s);
    lunai_run(parallel, lunai_sweep_scans, s);
    lunai_run(parallel, lunai_sweep_outputs, s);
  }
  for (item = 0; s->exchange && item < s->items; item++) s->exchange(s->args, item, lunai_sweep_carried(s, item), true);
}

/* ---- parts of a chunk ---- */

/* the triangle is computed as two triangles of half a chunk and the square below them */
#define LUNAI_HALF (LUNAI_CHUNK / 2)

/* scores = (X Y^T) o L: above the diagonal a triangle gets 0, whatever was there; the square above is neither written
   nor read */
LUNAI_FN void lunai_chunk_scores(const lunai_causal_chunk *c, int64_t depth, const float *x, int64_t x_row,
                                 const float *y, int64_t y_row) {
  const int64_t head = lunai_min(c->rows, LUNAI_HALF), tail = c->rows - head;
  float *below = c->scores + head * LUNAI_CHUNK;
  int64_t t, end;
  c->kernels->fill_panels(c->rows, depth, y, 1, y_row, c->panels);
  lunai_matmul_panels(c->kernels, head, head, depth, x, x_row, 1, c->panels, 1, c->scores, LUNAI_CHUNK, false);
  if (tail > 0)
    lunai_matmul_panels(c->kernels, tail, c->rows, depth, x + head * x_row, x_row, 1, c->panels, 1, below, LUNAI_CHUNK,
                        false);
  for (t = 0; t < c->rows; t++) {
    end = t < head ? head : c->rows;
    memset(c->scores + t * LUNAI_CHUNK + t + 1, 0, (size_t)(end - t - 1) * sizeof(float));
  }
}

/* out = alpha scores Z (+ out) */
LUNAI_FN void lunai_causal_apply(const lunai_causal_chunk *c, int64_t n, float alpha, const float *z, int64_t z_row,
                                 float *out, int64_t out_row, bool accumulate) {
  const int64_t head = lunai_min(c->rows, LUNAI_HALF), tail = c->rows - head;
  lunai_matmul(c->kernels, c->rows, n, head, c->scores, LUNAI_CHUNK, 1, z, z_row, 1, alpha, out, out_row, accumulate,
               c->panels);
  if (tail > 0)
    lunai_matmul(c->kernels, tail, n, tail, c->scores + head * (LUNAI_CHUNK + 1), LUNAI_CHUNK, 1, z + head * z_row,
                 z_row, 1, alpha, out + head * out_row, out_row, true, c->panels);
}

/* out += scores^T X */
LUNAI_FN void lunai_causal_apply_transposed(const lunai_causal_chunk *c, int64_t n, const float *x, int64_t x_row,
                                            float *out, int64_t out_row) {
  const int64_t head = lunai_min(c->rows, LUNAI_HALF), tail = c->rows - head;
  lunai_matmul(c->kernels, head, n, head, c->scores, 1, LUNAI_CHUNK, x, x_row, 1, 1, out, out_row, true, c->panels);
  if (tail > 0)
    lunai_matmul(c->kernels, c->rows, n, tail, c->scores + head * LUNAI_CHUNK, 1, LUNAI_CHUNK, x + head * x_row, x_row,
                 1, 1, out, out_row, true, c->panels);
}

/* factor base / t of each row */
LUNAI_FN void lunai_causal_factors(const lunai_causal_chunk *c, float factor, double base, float *factors) {
  int64_t t;
  for (t = 0; t < c->rows; t++) factors[t] = (float)((double)factor * base / (c->before + (double)(t + 1)));
}

/* out = diag(factor / t) [before X M + scores Z]. Exactly causal: a score above the diagonal is 0, and 0 times a finite
   z changes no bit but the sign of a zero, which the last addition removes; a z that is not finite is 0 in the product,
   and added from its own row on. */
LUNAI_FN void lunai_causal_mix(const lunai_causal_chunk *c, int64_t dim, int64_t n, float factor, const float *x,
                               int64_t x_row, const float *mean, const float *z, int64_t z_row, float *out,
                               int64_t out_row, float *buffer) {
  float factors[LUNAI_CHUNK];
  const double base = c->begins ? 1 : c->before; /* what the bracket is divided by, to stay in range */
  const bool clean = c->kernels->all_finite(c->rows, n, z, z_row);
  const float *finite = clean ? z : buffer;
  int64_t t, i, j;
  if (!clean)
    for (t = 0; t < c->rows; t++)
      for (i = 0; i < n; i++) buffer[t * n + i] = z[t * z_row + i] - z[t * z_row + i] == 0 ? z[t * z_row + i] : 0;
  if (!c->begins) lunai_matmul(c->kernels, c->rows, n, dim, x, x_row, 1, mean, n, 1, 1, out, out_row, false, c->panels);
  lunai_causal_apply(c, n, (float)(1 / base), finite, clean ? z_row : n, out, out_row, !c->begins);
  if (!clean)
    for (j = 0; j < c->rows; j++)
      for (i = 0; i < n; i++)
        if (!(z[j * z_row + i] - z[j * z_row + i] == 0))
          for (t = j; t < c->rows; t++) out[t * out_row + i] += c->scores[t * LUNAI_CHUNK + j] * z[j * z_row + i];
  lunai_causal_factors(c, factor, base, factors);
  c->kernels->scale_rows(c->rows, n, factors, out, out_row, out, out_row);
}

/* y = diag(factor / t) x, dense */
LUNAI_FN void lunai_causal_divide(const lunai_causal_chunk *c, int64_t n, float factor, const float *x, int64_t x_row,
                                  float *y) {
  float factors[LUNAI_CHUNK];
  lunai_causal_factors(c, factor, 1, factors);
  c->kernels->scale_rows(c->rows, n, factors, x, x_row, y, n);
}

/* grad += G S^T + scores Y, S = before M [n, depth]: the gradient of the causal product's X */
LUNAI_FN void lunai_causal_grad_x(const lunai_causal_chunk *c, int64_t n, int64_t depth, const float *g, int64_t g_row,
                                  const float *mean, const float *y, int64_t y_row, float *grad, int64_t grad_row,
                                  bool accumulate) {
  if (!c->begins)
    lunai_matmul(c->kernels, c->rows, n, depth, g, g_row, 1, mean, 1, depth, (float)c->before, grad, grad_row,
                 accumulate, c->panels);
  lunai_causal_apply(c, n, 1, y, y_row, grad, grad_row, accumulate || !c->begins);
}

/* grad += A B + scores^T X, B [depth, n] with element (p, j) at b[p b_row + j b_column]: the gradient of Y (A = Z, B =
   R^T) and of Z (A = Y, B = R, X = G) */
LUNAI_FN void lunai_causal_grad_yz(const lunai_causal_chunk *c, int64_t n, int64_t depth, const float *a, int64_t a_row,
                                   const float *b, int64_t b_row, int64_t b_column, const float *x, int64_t x_row,
                                   float *grad, int64_t grad_row) {
  if (!c->begins) lunai_matmul(c->kernels, c->rows, n, depth, a, a_row, 1, b, b_row, b_column, 1, grad, grad_row, true,
                               c->panels);
  lunai_causal_apply_transposed(c, n, x, x_row, grad, grad_row);
}

/* state = Y^T Z */
LUNAI_FN void lunai_causal_sum(const lunai_causal_chunk *c, int64_t dim, int64_t n, const float *y, int64_t y_row,
                               const float *z, int64_t z_row, float *state) {
  if (!c->last) lunai_matmul(c->kernels, dim, n, c->rows, y, 1, y_row, z, z_row, 1, 1, state, n, false, c->panels);
}

/* ---- the causal product ---- */
LUNAI_INLINE int64_t lunai_causal_xy(const lunai_causal *a, const lunai_causal_chunk *c) {
  return c->item / a->heads * a->xy_batch + c->item % a->heads * a->xy_head + c->first * a->xy_row;
}
LUNAI_INLINE int64_t lunai_causal_z(const lunai_causal *a, const lunai_causal_chunk *c) {
  return c->item / a->heads * a->z_batch + c->item % a->heads * a->z_head + c->first * a->z_row;
}

LUNAI_FN void lunai_causal_sum_yz(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal *a = (const lunai_causal *)args;
  const int64_t xy = lunai_causal_xy(a, c), z = lunai_causal_z(a, c);
  lunai_causal_sum(c, a->dim, a->value_dim, a->y + xy, a->xy_row, a->z + z, a->z_row, c->state);
}

LUNAI_FN void lunai_causal_out(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal *a = (const lunai_causal *)args;
  const int64_t xy = lunai_causal_xy(a, c), z = lunai_causal_z(a, c);
  lunai_chunk_scores(c, a->dim, a->x + xy, a->xy_row, a->y + xy, a->xy_row);
  lunai_causal_mix(c, a->dim, a->value_dim, 1, a->x + xy, a->xy_row, c->state, a->z + z, a->z_row, a->out + z, a->z_row,
                   c->buffer[0]);
}

LUNAI_FN void lunai_causal_out_x(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal *a = (const lunai_causal *)args;
  const int64_t xy = lunai_causal_xy(a, c), z = lunai_causal_z(a, c), n = a->value_dim;
  float *g = c->buffer[0];
  lunai_causal_divide(c, n, 1, a->grad_out + z, a->z_row, g);
  lunai_chunk_scores(c, n, g, n, a->z + z, a->z_row);
  lunai_causal_grad_x(c, a->dim, n, g, n, c->state, a->y + xy, a->xy_row, a->grad_x + xy, a->xy_row, true);
}

/* reverse: kept = G, the state is R */
LUNAI_FN void lunai_causal_sum_xg(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal *a = (const lunai_causal *)args;
  lunai_causal_divide(c, a->value_dim, 1, a->grad_out + lunai_causal_z(a, c), a->z_row, c->kept);
  lunai_causal_sum(c, a->dim, a->value_dim, a->x + lunai_causal_xy(a, c), a->xy_row, c->kept, a->value_dim, c->state);
}

LUNAI_FN void lunai_causal_out_yz(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal *a = (const lunai_causal *)args;
  const int64_t xy = lunai_causal_xy(a, c), z = lunai_causal_z(a, c), n = a->value_dim;
  if (a->grad_y) {
    lunai_chunk_scores(c, n, c->kept, n, a->z + z, a->z_row);
    lunai_causal_grad_yz(c, a->dim, n, a->z + z, a->z_row, c->state, 1, n, a->x + xy, a->xy_row, a->grad_y + xy,
                         a->xy_row);
  }
  if (a->grad_z) {
    lunai_chunk_scores(c, a->dim, a->x + xy, a->xy_row, a->y + xy, a->xy_row);
    lunai_causal_grad_yz(c, n, a->dim, a->y + xy, a->xy_row, c->state, n, 1, c->kept, n, a->grad_z + z, a->z_row);
  }
}

LUNAI_FN void lunai_causal_sweep(lunai_sweep *s, const lunai_kernels *kernels, const lunai_causal *a, bool reverse) {
  memset(s, 0, sizeof *s);
  s->kernels = kernels;
  s->args = a;
  s->items = a->batch * a->heads;
  s->heads = a->heads;
  s->rows = a->rows;
  s->dim = a->dim;
  s->value_dim = a->value_dim;
  s->slots = 1;
  s->unit = a->dim * a->value_dim;
  s->kept = reverse ? LUNAI_CHUNK * a->value_dim : 0;
  s->reverse = reverse;
}

LUNAI_FN size_t lunai_causal_scratch(const lunai_kernels *kernels, const lunai_causal *a, int64_t threads,
                                     bool backward) {
  lunai_sweep s;
  lunai_causal_sweep(&s, kernels, a, backward); /* the reverse sweep needs more */
  return lunai_sweep_plan(&s, lunai_max(1, threads), NULL);
}

LUNAI_FN void lunai_run_causal(const lunai_kernels *kernels, const lunai_causal *a, const lunai_parallel *parallel,
                               void *scratch) {
  lunai_sweep s;
  lunai_causal_sweep(&s, kernels, a, false);
  s.sum = lunai_causal_sum_yz;
  s.output = lunai_causal_out;
  lunai_sweep_run(&s, parallel, scratch);
}

LUNAI_FN void lunai_run_causal_backward(const lunai_kernels *kernels, const lunai_causal *a,
                                        const lunai_parallel *parallel, void *scratch) {
  lunai_sweep s;
  if (a->grad_x) {
    lunai_causal_sweep(&s, kernels, a, false);
    s.sum = lunai_causal_sum_yz;
    s.output = lunai_causal_out_x;
    lunai_sweep_run(&s, parallel, scratch);
  }
  if (a->grad_y || a->grad_z) {
    lunai_causal_sweep(&s, kernels, a, true);
    s.sum = lunai_causal_sum_xg;
    s.output = lunai_causal_out_yz;
    lunai_sweep_run(&s, parallel, scratch);
  }
}

/* ---- causal Luna: masked slots are left out of every product and never read ---- */

/* a chunk's offset in q, k, v, out (wide), in s and w (narrow), and its real slots */
typedef struct lunai_luna_place { int64_t wide, wide_row, narrow, narrow_row, slots; } lunai_luna_place;
LUNAI_FN lunai_luna_place lunai_luna_at(const lunai_causal_luna *a, const lunai_causal_chunk *c) {
  const int64_t b = c->item / a->heads, head = c->item % a->heads, row = (b * a->rows + c->first) * a->heads + head;
  lunai_luna_place p;
  p.wide = row * a->head_dim;
  p.wide_row = a->heads * a->head_dim;
  p.narrow = row * a->slots;
  p.narrow_row = a->heads * a->slots;
  p.slots = lunai_real_slots(a->lengths, b, a->slots);
  return p;
}

/* kept = A [rows, slots]; the states are k^T A and A^T v */
LUNAI_FN void lunai_luna_sum(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal_luna *a = (const lunai_causal_luna *)args;
  const lunai_luna_place p = lunai_luna_at(a, c);
  const int64_t d = a->head_dim, l = p.slots;
  c->kernels->copy_rows(c->rows, l, a->s + p.narrow, p.narrow_row, c->kept, l);
  c->kernels->activate(a->activation, c->rows * l, c->kept, c->kept);
  lunai_causal_sum(c, d, l, a->k + p.wide, p.wide_row, c->kept, l, c->state);
  lunai_causal_sum(c, l, d, c->kept, l, a->v + p.wide, p.wide_row, c->state + d * l);
}

LUNAI_FN void lunai_luna_out(const void *args, const lunai_causal_chunk *c) {
  const lunai_causal_luna *a = (const lunai_causal_luna *)args;
  const lunai_luna_place p = lunai_luna_at(a, c);
  const int64_t d = a->head_dim, l = p.slots, row = p.wide_row;
  float *w = c->buffer[0];
  int64_t t;
  lunai_chunk_scores(c, d, a->q + p.wide, row, a->k + p.wide, row);
  lunai_causal_mix(c, d, l, a->scale, a->q + p.wide, row, c->state, c->kept, l, w, l, c->buffer[1]);
  c->kernels->softmax(c->rows, l, w, w);
  if (a->w) c->kernels->copy_rows(c->rows, l, w, l, a->w + p.narrow, p.narrow_row);
  for (t = 0; a->w && l < a->slots && t < c->rows; t++)
    memset(a->w + p.narrow + t * p.narrow_row + l, 0, (size_t)(a->slots - l) * sizeof(float));
  lunai_chunk_scores(c, l, w, l, c->kept, l);
  lunai_causal_mix(c, l, d, 1, w, l, c->state + d * l, a->v + p.wide, row, a->out + p.wide, row, c->buffer[1]);
}

LUNAI_FN void lunai_luna_exchange(const void *args, int64_t item, double *state, bool store) {
  const lunai_causal_luna *a = (const lunai_causal_luna *)args;
  const int64_t d = a->head_dim, l = lunai_real_slots(a->lengths, item / a->heads, a->slots);
  double *ka = a->mean_ka + item * d * a->slots, *av = a->mean_av + item * d * a->slots;
  int64_t i;
  for (i = 0; i < d; i++) {
    double *own = state + i * l, *callers = ka + i * a->slots;
    memcpy(store ? callers : own, store ? own : callers, (size_t)l * sizeof(double));
  }
  memcpy(store ? av : state + d * l, store ? state + d * l : av, (size_t)(d * l) * sizeof(double));
}

typedef struct lunai_luna_steps {
  const lunai_kernels *kernels; const lunai_causal_luna *args; char *scratch;
} lunai_luna_steps;
LUNAI_INLINE int64_t lunai_step_bytes(const lunai_causal_luna *a) {
  return 2 * lunai_floats(a->slots) + (int64_t)lunai_round((size_t)lunai_max(a->slots, a->head_dim) * sizeof(double));
}

/* one row: no chunk */
LUNAI_FN void lunai_luna_step(void *work, int64_t thread, int64_t threads) {
  const lunai_luna_steps *s = (const lunai_luna_steps *)work;
  const lunai_causal_luna *a = s->args;
  const int64_t d = a->head_dim, items = a->batch * a->heads, end = lunai_share(items, thread + 1, threads);
  const double share = 1 / (double)(a->position + 1);
  char *scratch = s->scratch + thread * lunai_step_bytes(a);
  float *omega = lunai_take(&scratch, a->slots), *w = lunai_take(&scratch, a->slots);
  double *sum = (double *)(void *)scratch;
  int64_t item, i;
  for (item = lunai_share(items, thread, threads); item < end; item++) {
    const int64_t l = lunai_real_slots(a->lengths, item / a->heads, a->slots), wide = item * d,
                  narrow = item * a->slots;
    double *ka = a->mean_ka + wide * a->slots, *av = a->mean_av + wide * a->slots;
    if (a->position == 0) {
      for (i = 0; i < d; i++) memset(ka + i * a->slots, 0, (size_t)l * sizeof(double));
      memset(av, 0, (size_t)(l * d) * sizeof(double));
    }
    s->kernels->activate(a->activation, l, a->s + narrow, omega);
    s->kernels->step_state(d, l, share, a->k + wide, omega, a->q + wide, ka, a->slots, sum);
    for (i = 0; i < l; i++) w[i] = (float)(sum[i] * (double)a->scale);
    s->kernels->softmax(1, l, w, w);
    s->kernels->step_state(l, d, share, omega, a->v + wide, w, av, d, sum);
    for (i = 0; i < d; i++) a->out[wide + i] = (float)sum[i];
    for (i = 0; a->w && i < a->slots; i++) a->w[narrow + i] = i < l ? w[i] : 0;
  }
}

/* ---- causal Luna, backward ----
   G = diag(1/t) dOut, H = diag(scale/t) dU [rows, slots], which the forward sweep leaves for the reverse one. */
typedef struct lunai_luna_grads { const lunai_causal_luna *args; float *h; } lunai_luna_grads;
LUNAI_INLINE float *lunai_luna_h(const lunai_luna_grads *g, const lunai_causal_chunk *c) {
  return g->h + (c->item * g->args->rows + c->first) * g->args->slots;
}
LUNAI_FN void lunai_luna_sum_up(const void *args, const lunai_causal_chunk *c) {
  lunai_luna_sum(((const lunai_luna_grads *)args)->args, c);
}

/* H, and the gradient of q */
LUNAI_FN void lunai_luna_out_up(const void *args, const lunai_causal_chunk *c) {
  const lunai_luna_grads *grads = (const lunai_luna_grads *)args;
  const lunai_causal_luna *a = grads->args;
  const lunai_luna_place p = lunai_luna_at(a, c);
  const int64_t d = a->head_dim, l = p.slots, row = p.wide_row;
  float *g = c->buffer[0], *w = c->buffer[0], *dw = c->buffer[1], *du = c->buffer[2], *h = lunai_luna_h(grads, c);
  lunai_causal_divide(c, d, 1, a->grad_out + p.wide, row, g);
  lunai_chunk_scores(c, d, g, d, a->v + p.wide, row);
  lunai_causal_grad_x(c, l, d, g, d, c->state + d * l, c->kept, l, dw, l, false);
  c->kernels->copy_rows(c->rows, l, a->w + p.narrow, p.narrow_row, w, l);
  memset(du, 0, (size_t)(c->rows * l) * sizeof(float));
  c->kernels->softmax_backward(c->rows, l, w, dw, du);
  lunai_causal_divide(c, l, a->scale, du, l, h);
  if (!a->grad_q) return;
  lunai_chunk_scores(c, l, h, l, c->kept, l);
  lunai_causal_grad_x(c, d, l, h, l, c->state, a->k + p.wide, row, a->grad_q + p.wide, row, true);
}

/* kept = A, then G; the states are q^T H and W^T G */
LUNAI_FN void lunai_luna_sum_down(const void *args, const lunai_causal_chunk *c) {
  const lunai_luna_grads *grads = (const lunai_luna_grads *)args;
  const lunai_causal_luna *a = grads->args;
  const lunai_luna_place p = lunai_luna_at(a, c);
  const int64_t d = a->head_dim, l = p.slots;
  float *g = c->kept + LUNAI_CHUNK * l;
  c->kernels->copy_rows(c->rows, l, a->s + p.narrow, p.narrow_row, c->kept, l);
  c->kernels->activate(a->activation, c->rows * l, c->kept, c->kept);
  lunai_causal_divide(c, d, 1, a->grad_out + p.wide, p.wide_row, g);
  lunai_causal_sum(c, d, l, a->q + p.wide, p.wide_row, lunai_luna_h(grads, c), l, c->state);
  lunai_causal_sum(c, l, d, a->w + p.narrow, p.narrow_row, g, d, c->state + d * l);
}

LUNAI_FN void lunai_luna_out_down(const void *args, const lunai_causal_chunk *c) {
  const lunai_luna_grads *grads = (const lunai_luna_grads *)args;
  const lunai_causal_luna *a = grads->args;
  const lunai_luna_place p = lunai_luna_at(a, c);
  const int64_t d = a->head_dim, l = p.slots, row = p.wide_row, narrow_row = p.narrow_row;
  const float *omega = c->kept, *g = c->kept + LUNAI_CHUNK * l, *h = lunai_luna_h(grads, c), *r = c->state,
              *r2 = c->state + d * l;
  const float *q = a->q + p.wide, *k = a->k + p.wide, *v = a->v + p.wide, *w = a->w + p.narrow;
  if (a->grad_k) {
    lunai_chunk_scores(c, l, h, l, omega, l);
    lunai_causal_grad_yz(c, d, l, omega, l, r, 1, l, q, row, a->grad_k + p.wide, row);
  }
  if (a->grad_v) {
    lunai_chunk_scores(c, l, w, narrow_row, omega, l);
    lunai_causal_grad_yz(c, d, l, omega, l, r2, d, 1, g, d, a->grad_v + p.wide, row);
  }
  if (a->grad_s) {
    float *domega = c->buffer[0], *s = c->buffer[1], *ds = c->buffer[2];
    memset(domega, 0, (size_t)(c->rows * l) * sizeof(float));
    lunai_chunk_scores(c, d, q, row, k, row);
    lunai_causal_grad_yz(c, l, d, k, row, r, l, 1, h, l, domega, l);
    lunai_chunk_scores(c, d, g, d, v, row);
    lunai_causal_grad_yz(c, l, d, v, row, r2, 1, d, w, narrow_row, domega, l);
    c->kernels->copy_rows(c->rows, l, a->s + p.narrow, narrow_row, s, l);
    c->kernels->copy_rows(c->rows, l, a->grad_s + p.narrow, narrow_row, ds, l);
    c->kernels->activate_backward(a->activation, c->rows * l, s, domega, ds);
    c->kernels->copy_rows(c->rows, l, ds, l, a->grad_s + p.narrow, narrow_row);
  }
}

LUNAI_FN void lunai_luna_sweep(lunai_sweep *s, const lunai_kernels *kernels, const lunai_causal_luna *a, bool reverse) {
  lunai_clear(s, sizeof *s);
  s->kernels = kernels;
  s->items = a->batch * a->heads;
  s->heads = a->heads;
  s->rows = a->rows;
  s->position = a->position;
  s->dim = a->head_dim;
  s->value_dim = s->slots = a->slots;
  s->lengths = a->lengths;
  s->unit = 2 * a->head_dim;
  s->kept = LUNAI_CHUNK * (reverse ? a->slots + a->head_dim : a->slots);
  s->reverse = reverse;
}

LUNAI_FN size_t lunai_causal_luna_scratch(const lunai_kernels *kernels, const lunai_causal_luna *a, int64_t threads,
                                          bool backward) {
  lunai_sweep s;
  threads = lunai_max(1, threads);
  if (a->mean_ka && a->rows == 1) return (size_t)(threads * lunai_step_bytes(a));
  lunai_luna_sweep(&s, kernels, a, backward);
  return lunai_sweep_plan(&s, threads, NULL) + (backward ? (size_t)lunai_floats(s.items * s.rows * s.slots) : 0);
}

LUNAI_FN void lunai_run_causal_luna(const lunai_kernels *kernels, const lunai_causal_luna *a,
                                    const lunai_parallel *parallel, void *scratch) {
  lunai_sweep s;
  if (a->mean_ka && a->rows == 1) {
    lunai_luna_steps steps;
    steps.kernels = kernels;
    steps.args = a;
    steps.scratch = (char *)scratch;
    lunai_run(lunai_worth(parallel, a->batch * a->heads * a->head_dim * a->slots), lunai_luna_step, &steps);
    return;
  }
  lunai_luna_sweep(&s, kernels, a, false);
  s.args = a;
  s.sum = lunai_luna_sum;
  s.output = lunai_luna_out;
  if (a->mean_ka && a->rows > 0) s.exchange = lunai_luna_exchange;
  lunai_sweep_run(&s, parallel, scratch);
}

LUNAI_FN void lunai_run_causal_luna_backward(const lunai_kernels *kernels, const lunai_causal_luna *a,
                                             const lunai_parallel *parallel, void *scratch) {
  lunai_luna_grads grads;
  lunai_sweep s;
  char *rest = (char *)scratch;
  grads.args = a;
  grads.h = lunai_take(&rest, a->batch * a->heads * a->rows * a->slots);
  lunai_luna_sweep(&s, kernels, a, false);
  s.args = &grads;
  s.sum = lunai_luna_sum_up;
  s.output = lunai_luna_out_up;
  lunai_sweep_run(&s, parallel, rest);
  if (!a->grad_k && !a->grad_v && !a->grad_s) return;
  lunai_luna_sweep(&s, kernels, a, true);
  s.args = &grads;
  s.sum = lunai_luna_sum_down;
  s.output = lunai_luna_out_down;
  lunai_sweep_run(&s, parallel, rest);
}
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>table: the kernels of an instruction set, its loops and the drivers that run on them
   ------------------------------------------------------------------------------------------------------------------ */
#ifndef LUNAI_PASS
/* the reference's: no panels, and scratch only where a row's probabilities or a running mean need it */
LUNAI_FN size_t lunai_gemm_scratch_reference(const lunai_gemm *g, int64_t threads) { return (void)g, (void)threads, 0; }
LUNAI_FN size_t lunai_panels_bytes_reference(int64_t n, int64_t k) { return (void)n, (void)k, 0; }
LUNAI_FN void lunai_make_panels_reference(const lunai_gemm *g, const lunai_parallel *parallel, void *panels) {
  (void)g, (void)parallel, (void)panels;
}
LUNAI_FN size_t lunai_attention_scratch_reference(const lunai_attention *a, int64_t threads, bool backward) {
  return (void)a, (void)threads, (void)backward, 0;
}
LUNAI_FN size_t lunai_causal_scratch_reference(const lunai_causal *c, int64_t threads, bool backward) {
  return (void)c, (void)threads, (void)backward, 0;
}
static LUNAI_UNUSED const lunai_kernels lunai_kernels_reference = {
  1, 1,
#define LUNAI_FIELD(result, name, arguments) lunai_##name##_reference,
#define LUNAI_FIELD_TRAIN(result, name, arguments) LUNAI_TRAIN(lunai_##name##_reference),
#define LUNAI_NONE(result, name, arguments) NULL,
  LUNAI_KERNELS(LUNAI_FIELD, LUNAI_FIELD, LUNAI_FIELD_TRAIN)
  LUNAI_LOOPS(LUNAI_NONE, LUNAI_NONE, LUNAI_NONE)
#undef LUNAI_FIELD
#undef LUNAI_FIELD_TRAIN
#undef LUNAI_NONE
};
#endif

#ifdef LUNAI_PASS_LOOPS
static const lunai_kernels LUNAI_K(kernels) = {
  LUNAI_MR, LUNAI_NR,
#define LUNAI_FIELD(result, name, arguments) LUNAI_K(name),
#define LUNAI_FIELD_REST(result, name, arguments) LUNAI_REST(LUNAI_K(name)),
#define LUNAI_FIELD_TRAIN(result, name, arguments) LUNAI_TRAIN(LUNAI_K(name)),
  LUNAI_KERNELS(LUNAI_FIELD, LUNAI_FIELD_REST, LUNAI_FIELD_TRAIN)
  LUNAI_LOOPS(LUNAI_FIELD, LUNAI_FIELD_REST, LUNAI_FIELD_TRAIN)
#undef LUNAI_FIELD
#undef LUNAI_FIELD_REST
#undef LUNAI_FIELD_TRAIN
};

#undef LUNAI_DRIVER
#undef LUNAI_DRIVER_SCRATCH
#define LUNAI_DRIVER(name, type) \
  LUNAI_FN void LUNAI_K(name)(const type *a, const lunai_parallel *parallel, void *scratch) { \
    lunai_run_##name(&LUNAI_K(kernels), a, parallel, scratch); \
  }
#define LUNAI_DRIVER_SCRATCH(name, type) \
  LUNAI_FN size_t LUNAI_K(name)(const type *a, int64_t threads, bool backward) { \
    return lunai_##name(&LUNAI_K(kernels), a, threads, backward); \
  }
LUNAI_DRIVER(gemm, lunai_gemm)
LUNAI_DRIVER(make_panels, lunai_gemm)
LUNAI_DRIVER(attention, lunai_attention)
LUNAI_DRIVER(attention_backward, lunai_attention)
LUNAI_DRIVER(unpack, lunai_unpack)
LUNAI_DRIVER(unpack_backward, lunai_unpack)
LUNAI_DRIVER(causal, lunai_causal)
LUNAI_DRIVER(causal_backward, lunai_causal)
LUNAI_DRIVER(causal_luna, lunai_causal_luna)
LUNAI_DRIVER(causal_luna_backward, lunai_causal_luna)
LUNAI_DRIVER_SCRATCH(attention_scratch, lunai_attention)
LUNAI_DRIVER_SCRATCH(unpack_scratch, lunai_unpack)
LUNAI_DRIVER_SCRATCH(causal_scratch, lunai_causal)
LUNAI_DRIVER_SCRATCH(causal_luna_scratch, lunai_causal_luna)
LUNAI_FN size_t LUNAI_K(gemm_scratch)(const lunai_gemm *g, int64_t threads) {
  return lunai_gemm_scratch(&LUNAI_K(kernels), g, threads);
}
LUNAI_FN void LUNAI_K(cross_entropy)(const lunai_cross_entropy *a) { lunai_run_cross_entropy(&LUNAI_K(kernels), a); }
LUNAI_FN size_t LUNAI_K(panels_bytes)(int64_t n, int64_t k) { return lunai_panels_bytes(&LUNAI_K(kernels), n, k); }

#endif /* LUNAI_PASS_LOOPS */

#ifndef LUNAI_PASS
#define LUNAI_IMPLEMENTED

/* ---------------------------------------------------------------------------------------------------------------------
   >>dispatch: one pass an instruction set, and the choice among them at run time
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNAI_JOIN2(a, b) a##b
#define LUNAI_JOIN(a, b) LUNAI_JOIN2(a, b)
#define LUNAI_K(name) LUNAI_JOIN(LUNAI_JOIN(lunai_, name), LUNAI_SUFFIX)
#ifndef LUNA_HEADER_FILENAME
#define LUNA_HEADER_FILENAME "luna.h"
#endif

#define LUNAI_ISA_SCALAR 1
#define LUNAI_ISA_SSE2 2
#define LUNAI_ISA_AVX2 3
#define LUNAI_ISA_AVX512 4
#define LUNAI_ISA_NEON 5
#define LUNAI_ISA_WASM 6

#if !defined(LUNA_NO_SIMD) && !defined(LUNAI_DOUBLE) && !defined(__CUDACC__)
#if (defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))) || \
  (defined(_M_X64) && !defined(_M_ARM64EC) && defined(LUNAI_MSVC))
#define LUNAI_X86
#define LUNAI_SIMD
#include <immintrin.h>
/* what the compiler promises: passes below it are left out */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LUNAI_BASELINE LUNAI_ISA_AVX512
#elif defined(__AVX2__) && defined(__FMA__)
#define LUNAI_BASELINE LUNAI_ISA_AVX2
#else
#define LUNAI_BASELINE LUNAI_ISA_SSE2
#endif
#ifdef LUNAI_MSVC
#include <intrin.h>
#endif
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define LUNAI_NEON
#define LUNAI_SIMD
#include <arm_neon.h>
#elif defined(__wasm_simd128__)
#define LUNAI_WASM
#define LUNAI_SIMD
#include <wasm_simd128.h>
#endif
#endif

#define LUNAI_PASS LUNAI_ISA_SCALAR
#define LUNAI_SUFFIX _scalar
#include LUNA_HEADER_FILENAME
#undef LUNAI_PASS
#undef LUNAI_SUFFIX

#ifdef LUNAI_X86
#if LUNAI_BASELINE == LUNAI_ISA_SSE2
#define LUNAI_PASS LUNAI_ISA_SSE2
#define LUNAI_SUFFIX _sse2
#include LUNA_HEADER_FILENAME
#undef LUNAI_PASS
#undef LUNAI_SUFFIX
#endif

#if LUNAI_BASELINE <= LUNAI_ISA_AVX2
#if defined(LUNAI_MSVC)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define LUNAI_PASS LUNAI_ISA_AVX2
#define LUNAI_SUFFIX _avx2
#include LUNA_HEADER_FILENAME
#undef LUNAI_PASS
#undef LUNAI_SUFFIX
#if defined(LUNAI_MSVC)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(LUNAI_MSVC)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define LUNAI_PASS LUNAI_ISA_AVX512
#define LUNAI_SUFFIX _avx512
#include LUNA_HEADER_FILENAME
#undef LUNAI_PASS
#undef LUNAI_SUFFIX
#if defined(LUNAI_MSVC)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif /* LUNAI_X86 */

#if defined(LUNAI_NEON)
#define LUNAI_PASS LUNAI_ISA_NEON
#define LUNAI_SUFFIX _neon
#include LUNA_HEADER_FILENAME
#undef LUNAI_PASS
#undef LUNAI_SUFFIX
#elif defined(LUNAI_WASM)
#define LUNAI_PASS LUNAI_ISA_WASM
#define LUNAI_SUFFIX _wasm
#include LUNA_HEADER_FILENAME
#undef LUNAI_PASS
#undef LUNAI_SUFFIX
#endif

#ifdef LUNAI_X86
#ifdef LUNAI_MSVC
LUNAI_FN void lunai_cpuid(uint32_t leaf, uint32_t part, uint32_t out[4]) {
  int r[4];
  __cpuidex(r, (int)leaf, (int)part);
  memcpy(out, r, sizeof r);
}
LUNAI_FN uint32_t lunai_xgetbv(void) { return (uint32_t)_xgetbv(0); }
#else
LUNAI_FN void lunai_cpuid(uint32_t leaf, uint32_t part, uint32_t out[4]) {
  __asm__ volatile("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(part));
}
LUNAI_FN uint32_t lunai_xgetbv(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
#endif
/* supported by the processor and saved by the operating system: xgetbv tells whether wide registers survive a
   context switch */
LUNAI_FN int lunai_isa_detect(void) {
  uint32_t r[4], low;
  lunai_cpuid(0, 0, r);
  if (r[0] < 7) return LUNAI_BASELINE;
  lunai_cpuid(1, 0, r);
  if ((r[2] & (1u << 27)) == 0 || (r[2] & (1u << 12)) == 0) return LUNAI_BASELINE; /* OSXSAVE, FMA */
  low = lunai_xgetbv();
  lunai_cpuid(7, 0, r);
  if ((low & 6) != 6 || (r[1] & (1u << 5)) == 0) return LUNAI_BASELINE;
  if ((low & 0xE0) != 0xE0 || (r[1] & (1u << 16)) == 0 || (r[1] & (1u << 17)) == 0 || (r[1] & (1u << 30)) == 0 ||
      (r[1] & (1u << 31)) == 0)
    return LUNAI_BASELINE > LUNAI_ISA_AVX2 ? LUNAI_BASELINE : LUNA_ISA_AVX2;
  return LUNA_ISA_AVX512;
}
#else
LUNAI_FN int lunai_isa_detect(void) {
#if defined(LUNAI_NEON)
  return LUNA_ISA_NEON;
#elif defined(LUNAI_WASM)
  return LUNA_ISA_WASM;
#else
  return LUNA_ISA_SCALAR;
#endif
}
#endif

/* CPUID traps in virtual machines, so its answer is kept. The only global: written once, always with the same value. */
LUNA_API luna_isa luna_isa_best(void) {
#if defined(LUNAI_MSVC)
  static volatile int known;
  int isa = known;
  if (isa == 0) known = isa = lunai_isa_detect();
  return (luna_isa)isa;
#elif defined(__GNUC__) || defined(__clang__)
  static int known;
  int isa = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (isa == 0) {
    isa = lunai_isa_detect();
    __atomic_store_n(&known, isa, __ATOMIC_RELAXED);
  }
  return (luna_isa)isa;
#else
  return (luna_isa)lunai_isa_detect();
#endif
}

/* the kernels of an instruction set, LUNA_ISA_BEST: the best available; null when this build or machine lacks it */
LUNAI_FN const lunai_kernels *lunai_kernels_of(luna_isa isa) {
  const luna_isa best = luna_isa_best();
  if (isa == LUNA_ISA_BEST) isa = best;
#ifndef LUNA_ONLY_STREAM
  if (isa == LUNA_ISA_REFERENCE) return &lunai_kernels_reference;
#endif
#ifndef LUNAI_SIMD
  if (isa == LUNA_ISA_SCALAR) return &lunai_kernels_scalar;
#endif
#ifdef LUNAI_X86
  if (isa > best) return NULL;
#if LUNAI_BASELINE == LUNAI_ISA_SSE2
  if (isa == LUNA_ISA_SSE2) return &lunai_kernels_sse2;
#endif
#if LUNAI_BASELINE <= LUNAI_ISA_AVX2
  if (isa == LUNA_ISA_AVX2) return &lunai_kernels_avx2;
#endif
  if (isa == LUNA_ISA_AVX512) return &lunai_kernels_avx512;
#elif defined(LUNAI_NEON)
  if (isa == LUNA_ISA_NEON) return &lunai_kernels_neon;
#elif defined(LUNAI_WASM)
  if (isa == LUNA_ISA_WASM) return &lunai_kernels_wasm;
#endif
  return NULL;
}

LUNA_API bool luna_isa_available(luna_isa isa) { return lunai_kernels_of(isa) != NULL; }

LUNA_API const char *luna_isa_name(luna_isa isa) {
  switch (isa) {
    case LUNA_ISA_BEST: return "best";
    case LUNA_ISA_SCALAR: return "scalar";
    case LUNA_ISA_SSE2: return "SSE2";
    case LUNA_ISA_AVX2: return "AVX2";
    case LUNA_ISA_AVX512: return "AVX-512";
    case LUNA_ISA_NEON: return "NEON";
    case LUNA_ISA_WASM: return "WASM SIMD128";
    case LUNA_ISA_REFERENCE: return "reference";
  }
  return "unknown";
}

LUNA_API int luna_version(void) { return LUNA_VERSION_NUMBER; }
LUNA_API const char *luna_status_text(luna_status status) {
  switch (status) {
    case LUNA_OK: return "ok";
    case LUNA_BAD_ARGUMENT: return "bad argument";
    case LUNA_OUT_OF_MEMORY: return "out of memory";
    case LUNA_BAD_FILE: return "bad file";
    case LUNA_CANNOT_READ: return "cannot read";
    case LUNA_CANNOT_WRITE: return "cannot write";
    case LUNA_MISMATCH: return "names or shapes differ";
    case LUNA_UNSUPPORTED: return "unsupported";
    case LUNA_DEVICE_FAILED: return "the device failed";
    case LUNA_NOT_FINITE: return "not finite";
  }
  return "unknown status";
}

LUNAI_FN bool lunai_causal_fits(int64_t dim, int64_t value_dim) {
  return lunai_product(dim, value_dim, LUNAI_MAX_SCRATCH) > 0;
}
LUNAI_FN uint32_t lunai_dropout_threshold(float probability) { return (uint32_t)((double)probability * 65536.0 + 0.5); }
LUNAI_FN lunai_dropout lunai_dropout_of(float probability, uint64_t seed, uint32_t op, uint32_t step) {
  lunai_dropout d;
  memset(&d, 0, sizeof d);
  if (!(probability > 0)) return d;
  d.seed = seed;
  d.op = op;
  d.step = step;
  d.threshold = lunai_dropout_threshold(probability);
  d.keep = 1.0f / (1.0f - probability);
  return d;
}

/* --- sparse attention: which keys a query sees --- */
/* whether patterns are valid for these sizes */
LUNAI_FN bool lunai_pattern_is_good(const luna_attention_pattern *p, int64_t queries, int64_t keys) {
  const int64_t numbered = p->key_order ? p->key_count : keys;
  int64_t i;
  if (p->blocks == 0) return !p->query_order && !p->key_order;
  if (p->blocks < 0 || p->blocks > INT32_MAX || !p->queries || !p->offsets || p->key_count < 0 ||
      p->key_count > INT32_MAX) return false;
  if (p->queries[0] < 0 || p->offsets[0] < 0) return false;
  for (i = 0; i < p->blocks; i++)
    if (p->queries[i + 1] < p->queries[i] || p->offsets[i + 1] < p->offsets[i]) return false;
  if (p->queries[p->blocks] > queries || (p->offsets[p->blocks] > 0 && !p->runs)) return false;
  for (i = p->offsets[0]; i < p->offsets[p->blocks]; i++)
    if (p->runs[i].first < 0 || p->runs[i].count < 0 || (int64_t)p->runs[i].first + p->runs[i].count > numbered)
      return false;
  for (i = 0; p->query_order && i < p->queries[p->blocks]; i++)
    if (p->query_order[i] < 0 || p->query_order[i] >= queries) return false;
  for (i = 0; p->key_order && i < p->key_count; i++)
    if (p->key_order[i] < 0 || p->key_order[i] >= keys) return false;
  return true;
}
LUNAI_FN bool lunai_patterns_are_good(const luna_attention_pattern *patterns, int64_t count, int64_t batch,
                                      int64_t heads, int64_t queries, int64_t keys) {
  int64_t i;
  if (!patterns) return count == 0;
  if ((count != 1 && count != heads && count != lunai_checked(batch, heads)) || queries > INT32_MAX || keys > INT32_MAX)
    return false;
  for (i = 0; i < count; i++) if (!lunai_pattern_is_good(&patterns[i], queries, keys)) return false;
  return true;
}

#define LUNAI_ERROR(id, status, sentence) sentence,
#ifdef LUNA_ONLY_STREAM
static const char *const lunai_sentences[] = { "", LUNA_STREAM_ERRORS(LUNAI_ERROR) };
#undef LUNAI_ERROR
#else
static const char *const lunai_sentences[] = { "", LUNA_ERRORS(LUNAI_ERROR) };
#undef LUNAI_ERROR
#define LUNAI_ERROR(id, status, sentence) (uint8_t)LUNA_##status,
static const uint8_t lunai_statuses[] = { (uint8_t)LUNA_OK, LUNA_ERRORS(LUNAI_ERROR) };
#undef LUNAI_ERROR
/* ---------------------------------------------------------------------------------------------------------------------
   >>functions: the context-free calls
   Without scratch they run the reference. Guarded by tests/ops.c.
   ------------------------------------------------------------------------------------------------------------------ */
LUNA_API void luna_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
  if (counter && out) lunai_philox(counter, key, out);
}

LUNAI_FN lunai_parallel lunai_parallel_of(const luna_run *run) {
  lunai_parallel p;
  p.run = run->parallel_for;
  p.user = run->parallel_user;
  p.threads = run->parallel_for && run->threads > 1 ? lunai_min(run->threads, LUNAI_MAX_THREADS) : 1;
  return p;
}

/* the aligned scratch of a run when it holds `need` bytes, else null */
LUNAI_FN void *lunai_scratch_of(const luna_run *run, size_t need) {
  const uintptr_t at = (uintptr_t)run->scratch, aligned = (at + (LUNAI_ALIGN - 1)) & ~(uintptr_t)(LUNAI_ALIGN - 1);
  if (!run->scratch || run->scratch_size < aligned - at || run->scratch_size - (aligned - at) < need) return NULL;
  return (void *)aligned;
}

/* `count` parts of `extent` floats each, `given` apart (0: `dense`): sets *stride, and returns the floats they reach
   over together; -1 when a size or a stride is negative, or a product too large. */
LUNAI_FN int64_t lunai_extent(int64_t extent, int64_t count, int64_t given, int64_t dense, int64_t *stride) {
  const int64_t last = lunai_checked(lunai_max(count, 1) - 1, *stride = given ? given : dense);
  return extent < 0 || count < 0 || last < 0 || dense < 0 || extent > LUNAI_MAX_COUNT - last ? -1 : extent + last;
}
/* the same for the batch of an input, which may share one part */
LUNAI_FN int64_t lunai_extent_shared(int64_t extent, int64_t count, int64_t given, int64_t dense, int64_t *stride) {
  if (given != LUNA_SHARED) return lunai_extent(extent, count, given, dense, stride);
  *stride = 0;
  return lunai_checked(count, 1) < 0 ? -1 : extent;
}

/* --- gemm --- */
LUNAI_FN luna_status lunai_gemm_of(const luna_gemm_args *args, lunai_gemm *g) {
  const int64_t batch = args->batch ? args->batch : 1;
  const int64_t a_width = args->transpose_a ? args->m : args->k, b_width = args->transpose_b ? args->k : args->n;
  const int64_t a_height = args->transpose_a ? args->k : args->m, b_height = args->transpose_b ? args->n : args->k;
  int64_t a, b, c;
  memset(g, 0, sizeof *g);
  if (args->m < 0 || args->n < 0 || args->k < 0) return LUNA_BAD_ARGUMENT;
  if (!lunai_is_activation(args->activation) || !lunai_is_finite(args->alpha)) return LUNA_BAD_ARGUMENT;
  a = lunai_extent(a_width, a_height, args->a_row, a_width, &g->a_row);
  b = lunai_extent(b_width, b_height, args->b_row, b_width, &g->b_row);
  c = lunai_extent(args->n, args->m, args->c_row, args->n, &g->c_row);
  a = lunai_extent_shared(a, batch, args->a_batch, lunai_checked(g->a_row, a_height), &g->a_batch[1]);
  b = lunai_extent_shared(b, batch, args->b_batch, lunai_checked(g->b_row, b_height), &g->b_batch[1]);
  c = lunai_extent(c, batch, args->c_batch, lunai_checked(g->c_row, args->m), &g->c_batch[1]);
  if (a < 0 || b < 0 || c < 0) return LUNA_BAD_ARGUMENT;
  g->a = args->a; g->b = args->b; g->c = args->c; g->bias = args->bias;
  g->m = args->m; g->n = args->n; g->k = args->k;
  g->batch[0] = 1;
  g->batch[1] = batch;
  g->a_column = args->transpose_a ? g->a_row : 1;
  if (args->transpose_a) g->a_row = 1;
  g->b_column = args->transpose_b ? g->b_row : 1;
  if (args->transpose_b) g->b_row = 1;
  g->alpha = args->alpha == 0 ? 1.0f : args->alpha;
  g->activation = (int)args->activation;
  g->accumulate = args->accumulate;
  g->dots = g->m == 1 && args->transpose_b;
  return LUNA_OK;
}

LUNA_API size_t luna_gemm_scratch(const luna_gemm_args *args) {
  const lunai_kernels *kernels = args ? lunai_kernels_of(args->run.isa) : NULL;
  lunai_gemm g;
  if (!kernels || lunai_gemm_of(args, &g) != LUNA_OK) return 0;
  return kernels->gemm_scratch(&g, lunai_parallel_of(&args->run).threads) + LUNAI_ALIGN;
}

LUNA_API luna_status luna_gemm_f32(const luna_gemm_args *args) {
  const lunai_kernels *kernels = args ? lunai_kernels_of(args->run.isa) : NULL;
  lunai_parallel parallel;
  lunai_gemm g;
  void *scratch;
  if (!args || lunai_gemm_of(args, &g) != LUNA_OK) return LUNA_BAD_ARGUMENT;
  if (g.m > 0 && g.n > 0 && (!g.c || (g.k > 0 && (!g.a || !g.b)))) return LUNA_BAD_ARGUMENT;
  if (!kernels) return LUNA_UNSUPPORTED;
  if (g.m == 0 || g.n == 0) return LUNA_OK;
  if (g.k == 0) g.a = g.b = g.c;        /* may be null, to which nothing may be added */
  parallel = lunai_parallel_of(&args->run);
  scratch = lunai_scratch_of(&args->run, kernels->gemm_scratch(&g, parallel.threads));
  (scratch ? kernels : &lunai_kernels_reference)->gemm(&g, &parallel, scratch);
  return LUNA_OK;
}

/* --- softmax attention --- */
/* rows of a ragged batch; -1 when the offsets fall, or start below 0 */
LUNAI_FN int64_t lunai_ragged_rows(const int32_t *offsets, int64_t batch) {
  int64_t b;
  for (b = 0; b < batch; b++) if (offsets[b] < 0 || offsets[b + 1] < offsets[b]) return -1;
  return batch > 0 ? offsets[batch] : 0;
}
/* The strides of q, k, v or out, [batch, rows, heads, dim] or, ragged, [rows, heads, dim]; false: there are none. */
LUNAI_FN bool lunai_heads_of(int64_t batch, int64_t rows, int64_t heads, int64_t dim, bool ragged, bool shared,
                             const int64_t given[3], int64_t *batch_stride, int64_t *row, int64_t *head) {
  int64_t extent = lunai_extent(dim, heads, given[2], dim, head);
  extent = lunai_extent(extent, rows, given[1], lunai_checked(heads, dim), row);
  if (ragged) *batch_stride = 0;
  else if (shared) extent = lunai_extent_shared(extent, batch, given[0], lunai_checked(rows, *row), batch_stride);
  else extent = lunai_extent(extent, batch, given[0], lunai_checked(rows, *row), batch_stride);
  return extent >= 0;
}
LUNAI_FN luna_status lunai_attention_of(const luna_attention_args *args, lunai_attention *a) {
  const int64_t value_dim = args->value_dim ? args->value_dim : args->head_dim;
  const int64_t q[3] = { args->q_batch, args->q_row, args->q_head },
      k[3] = { args->k_batch, args->k_row, args->k_head };
  const int64_t v[3] = { args->v_batch, args->v_row, args->v_head };
  const int64_t out[3] = { args->out_batch, args->out_row, args->out_head };
  const int64_t batch = args->batch, heads = args->heads, pairs = lunai_checked(batch, heads);
  const bool ragged = args->query_offsets != NULL;
  int64_t b, queries = args->queries, keys = args->keys;
  memset(a, 0, sizeof *a);
  if (pairs < 0 || heads < 1 || queries < 0 || keys < 0 || args->head_dim < 1 || value_dim < 1)
    return LUNA_BAD_ARGUMENT;
  if (lunai_max(args->head_dim, value_dim) > LUNAI_MAX_SCRATCH) return LUNA_BAD_ARGUMENT;
  if (!(args->dropout >= 0 && args->dropout < 1) || !lunai_is_finite(args->scale)) return LUNA_BAD_ARGUMENT;
  if (ragged != (args->key_offsets != NULL) || (ragged && args->lengths)) return LUNA_BAD_ARGUMENT;
  if (ragged) {
    queries = lunai_ragged_rows(args->query_offsets, args->batch);
    keys = lunai_ragged_rows(args->key_offsets, args->batch);
  }
  if (!lunai_heads_of(batch, queries, heads, args->head_dim, ragged, true, q, &a->q_batch, &a->q_row, &a->q_head) ||
      !lunai_heads_of(batch, keys, heads, args->head_dim, ragged, true, k, &a->k_batch, &a->k_row, &a->k_head) ||
      !lunai_heads_of(batch, keys, heads, value_dim, ragged, true, v, &a->v_batch, &a->v_row, &a->v_head) ||
      !lunai_heads_of(batch, queries, heads, value_dim, ragged, false, out, &a->out_batch, &a->out_row, &a->out_head))
    return LUNA_BAD_ARGUMENT;
  /* dropout numbers the scores */
  if (lunai_product(lunai_product(pairs, args->queries, INT64_MAX), args->keys, INT64_MAX) < 0)
    return LUNA_BAD_ARGUMENT;
  for (b = 0; args->lengths && b < batch; b++)
    if (args->lengths[b] < 0 || args->lengths[b] > keys) return LUNA_BAD_ARGUMENT;
  if ((args->patterns || args->grad_log_sum_exp) && (ragged || args->sums || args->grad_sums)) return LUNA_BAD_ARGUMENT;
  if (!lunai_patterns_are_good(args->patterns, args->pattern_count, batch, heads, queries, keys))
    return LUNA_BAD_ARGUMENT;
  for (b = 0; b < args->pattern_count; b++)
    if (lunai_product(lunai_product(pairs, args->queries, INT64_MAX), args->patterns[b].key_count, INT64_MAX) < 0)
      return LUNA_BAD_ARGUMENT;
  a->q = args->q; a->k = args->k; a->v = args->v; a->out = args->out; a->lse = args->log_sum_exp; a->sums = args->sums;
  a->batch = args->batch; a->heads = args->heads; a->queries = args->queries; a->keys = args->keys;
  a->head_dim = args->head_dim; a->value_dim = value_dim;
  a->lengths = args->lengths; a->query_offsets = args->query_offsets; a->key_offsets = args->key_offsets;
  a->scale = args->scale == 0 ? (float)(1.0 / sqrt((double)args->head_dim)) : args->scale;
  a->causal = args->causal;
  a->dropout = lunai_dropout_of(args->dropout, args->seed, args->dropout_op, args->step);
  a->grad_out = args->grad_out; a->grad_sums = args->grad_sums;
  a->grad_q = args->grad_q; a->grad_k = args->grad_k; a->grad_v = args->grad_v;
  a->patterns = args->patterns; a->pattern_count = args->pattern_count; a->grad_lse = args->grad_log_sum_exp;
  return LUNA_OK;
}

LUNA_API size_t luna_softmax_attention_scratch(const luna_attention_args *args) {
  const lunai_kernels *kernels = args ? lunai_kernels_of(args->run.isa) : NULL;
  int64_t threads;
  lunai_attention a;
  size_t forward, backward;
  if (!kernels || lunai_attention_of(args, &a) != LUNA_OK) return 0;
  threads = lunai_parallel_of(&args->run).threads;
  forward = kernels->attention_scratch(&a, threads, false);
  backward = kernels->attention_scratch(&a, threads, true);
  return (forward > backward ? forward : backward) + LUNAI_ALIGN;
}

LUNAI_FN luna_status lunai_attention_call(const luna_attention_args *args, bool backward) {
  const lunai_kernels *kernels = args ? lunai_kernels_of(args->run.isa) : NULL;
  lunai_parallel parallel;
  lunai_attention a;
  int64_t queries, keys;
  void *scratch;
  if (!args || lunai_attention_of(args, &a) != LUNA_OK) return LUNA_BAD_ARGUMENT;
  queries = a.query_offsets ? lunai_ragged_rows(a.query_offsets, a.batch) : a.batch > 0 ? a.queries : 0;
  keys = a.key_offsets ? lunai_ragged_rows(a.key_offsets, a.batch) : a.keys;
  if (queries > 0 && (!a.q || !a.out || (keys > 0 && (!a.k || !a.v)))) return LUNA_BAD_ARGUMENT;
  if (backward && queries > 0 && (!a.grad_out || !a.lse || (a.grad_sums && !a.sums))) return LUNA_BAD_ARGUMENT;
  if (!kernels) return LUNA_UNSUPPORTED;
  if (queries == 0) return LUNA_OK;
  if (keys == 0) a.k = a.v = a.out;     /* may be null, to which nothing may be added */
  parallel = lunai_parallel_of(&args->run);
  scratch = lunai_scratch_of(&args->run, kernels->attention_scratch(&a, parallel.threads, backward));
  if (!scratch) kernels = &lunai_kernels_reference;
  (backward ? kernels->attention_backward : kernels->attention)(&a, &parallel, scratch);
  return LUNA_OK;
}
LUNA_API luna_status luna_softmax_attention_f32(const luna_attention_args *args) {
  return lunai_attention_call(args, false);
}
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_softmax_attention_backward_f32(const luna_attention_args *args) {
  return lunai_attention_call(args, true);
}
#endif

/* --- causal product --- */
/* whether causal kernels can hold a head's running means [dim, value_dim] and a chunk's rows */
LUNAI_FN luna_status lunai_causal_of(const luna_causal_args *args, lunai_causal *c) {
  const int64_t heads = lunai_checked(lunai_checked(lunai_max(args->batch, 1), lunai_max(args->rows, 1)), args->heads);
  memset(c, 0, sizeof *c);
  if (args->batch < 0 || args->rows < 0 || heads < 1 || !lunai_causal_fits(args->dim, args->value_dim))
    return LUNA_BAD_ARGUMENT;
  if (lunai_checked(heads, args->dim) < 0 || lunai_checked(heads, args->value_dim) < 0) return LUNA_BAD_ARGUMENT;
  c->x = args->x; c->y = args->y; c->z = args->z; c->out = args->out;
  c->batch = args->batch; c->rows = args->rows; c->heads = args->heads; c->dim = args->dim;
  c->value_dim = args->value_dim;
  c->xy_head = args->dim;
  c->z_head = args->value_dim;
  c->xy_row = args->heads * args->dim;
  c->z_row = args->heads * args->value_dim;
  c->xy_batch = args->rows * c->xy_row;
  c->z_batch = args->rows * c->z_row;
  c->grad_out = args->grad_out; c->grad_x = args->grad_x; c->grad_y = args->grad_y; c->grad_z = args->grad_z;
  return LUNA_OK;
}

LUNA_API size_t luna_causal_product_scratch(const luna_causal_args *args) {
  const lunai_kernels *kernels = args ? lunai_kernels_of(args->run.isa) : NULL;
  int64_t threads;
  lunai_causal c;
  size_t forward, backward;
  if (!kernels || lunai_causal_of(args, &c) != LUNA_OK) return 0;
  threads = lunai_parallel_of(&args->run).threads;
  forward = kernels->causal_scratch(&c, threads, false);
  backward = kernels->causal_scratch(&c, threads, true);
  return (forward > backward ? forward : backward) + LUNAI_ALIGN;
}

LUNAI_FN luna_status lunai_causal_call(const luna_causal_args *args, bool backward) {
  const lunai_kernels *kernels = args ? lunai_kernels_of(args->run.isa) : NULL;
  lunai_parallel parallel;
  lunai_causal c;
  void *scratch;
  if (!args || lunai_causal_of(args, &c) != LUNA_OK) return LUNA_BAD_ARGUMENT;
  if (c.batch > 0 && c.rows > 0 && (!c.x || !c.y || !c.z || (backward ? !c.grad_out : !c.out)))
    return LUNA_BAD_ARGUMENT;
  if (!kernels) return LUNA_UNSUPPORTED;
  if (c.batch == 0 || c.rows == 0) return LUNA_OK;
  parallel = lunai_parallel_of(&args->run);
  scratch = lunai_scratch_of(&args->run, kernels->causal_scratch(&c, parallel.threads, backward));
  if (!scratch) kernels = &lunai_kernels_reference;
  (backward ? kernels->causal_backward : kernels->causal)(&c, &parallel, scratch);
  return LUNA_OK;
}
LUNA_API luna_status luna_causal_product_f32(const luna_causal_args *args) { return lunai_causal_call(args, false); }
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_causal_product_backward_f32(const luna_causal_args *args) {
  return lunai_causal_call(args, true);
}
#endif
#endif /* !LUNA_ONLY_STREAM */

/* ---------------------------------------------------------------------------------------------------------------------
   >>safetensors: reading and writing files of tensors, without allocation or stdio
   8 bytes: the header's size, little-endian. The header: {"__metadata__": {"key": "value", ...}, "name": {"dtype":
   "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} and spaces. Then the data, which the tensors cover without
   holes. lunai_st_open validates untrusted bytes once; the functions after it walk the same header and stay inside it.
   lunai_st_index, given memory, sorts names and keys: each is found in log n, and a hostile header costs n log n.
   Guarded by tests/safetensors.c.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNAI_ST_RANK 8                          /* dimensions a tensor may have */
#define LUNAI_ST_HEADER 100000000u               /* bytes a header may have: the format's own limit */
#define LUNAI_ST_BAD 0xFFFFFFFFu                 /* no character */

typedef struct lunai_st {
  const uint8_t *bytes, *data;
  const char *header;
  size_t size, data_size, header_size;
  /* where the object __metadata__ begins in the header; 0: there is none */
  size_t meta;
  size_t tensors, pairs;                         /* their number */
  bool contiguous;                               /* each tensor's data begins where the one before ends */
  uint64_t *names, *keys;                        /* the index: hash << 32 | where it opens in the header, sorted */
} lunai_st;

/* a JSON string between its quotes, escapes not decoded */
typedef struct lunai_st_text { const char *at; size_t size; } lunai_st_text;

typedef enum lunai_st_dtype {
  LUNAI_ST_BOOL, LUNAI_ST_U8, LUNAI_ST_I8, LUNAI_ST_F8_E4M3, LUNAI_ST_F8_E5M2, LUNAI_ST_I16, LUNAI_ST_U16, LUNAI_ST_F16,
  LUNAI_ST_BF16, LUNAI_ST_I32, LUNAI_ST_U32, LUNAI_ST_F32, LUNAI_ST_F64, LUNAI_ST_I64, LUNAI_ST_U64, LUNAI_ST_DTYPES
} lunai_st_dtype;

/* name and bytes an element, in the order of the enum */
typedef struct lunai_st_format { const char *name; int size; } lunai_st_format;
static LUNAI_UNUSED const lunai_st_format lunai_st_formats[LUNAI_ST_DTYPES] = {
  {"BOOL", 1}, {"U8", 1}, {"I8", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
  {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4}, {"F64", 8}, {"I64", 8}, {"U64", 8}
};

typedef struct lunai_st_tensor {
  lunai_st_text name;
  int dtype;                                     /* lunai_st_dtype */
  int rank;
  int64_t shape[LUNAI_ST_RANK];
  int64_t count;                                 /* elements */
  const uint8_t *data;                           /* at any alignment */
  size_t bytes;
} lunai_st_tensor;

/* Text: UTF-8 and the escapes of JSON. */

/* the UTF-8 character at *at (before end), which moves past it; LUNAI_ST_BAD when it is cut short, overlong or no
   character */
LUNAI_FN uint32_t lunai_st_utf8(const char **at, const char *end) {
  static const uint32_t min[4] = {0, 0x80, 0x800, 0x10000};
  const uint8_t *s = (const uint8_t *)*at;
  const int more = s[0] < 0xC0 ? 0 : s[0] < 0xE0 ? 1 : s[0] < 0xF0 ? 2 : 3;
  uint32_t code = s[0];
  int i;
  if (code >= 0x80) {
    if (more == 0 || code > 0xF4 || end - *at <= more) return LUNAI_ST_BAD;
    code &= 0x3Fu >> more;
    for (i = 1; i <= more; i++) {
      if ((s[i] & 0xC0) != 0x80) return LUNAI_ST_BAD;
      code = code << 6 | (s[i] & 0x3Fu);
    }
    if (code < min[more] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return LUNAI_ST_BAD;
  }
  *at += more + 1;
  return code;
}

LUNAI_FN size_t lunai_st_encode(uint32_t code, char out[4]) {
  const size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  size_t i;
  for (i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
  out[0] = (char)(n == 1 ? code : ((0xF00u >> n) & 0xFF) | code);
  return n;
}

LUNAI_FN uint32_t lunai_st_hex(const char *at, const char *end) {
  uint32_t value = 0;
  int i;
  if (end - at < 4) return LUNAI_ST_BAD;
  for (i = 0; i < 4; i++) {
    const char c = at[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' &&
        c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return LUNAI_ST_BAD;
    value = value << 4 | (uint32_t)digit;
  }
  return value;
}

/* the character of a JSON string at *at, which moves past it; LUNAI_ST_BAD when there is none */
LUNAI_FN uint32_t lunai_st_character(const char **at, const char *end) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  const char *s = *at, *letter;
  uint32_t code, low;
  if (s == end || (uint8_t)*s < 0x20) return LUNAI_ST_BAD;
  if (*s != '\\') return lunai_st_utf8(at, end);
  if (end - s < 2) return LUNAI_ST_BAD;
  if (s[1] != 'u') {
    letter = (const char *)memchr(letters, s[1], sizeof(letters) - 1);
    if (!letter) return LUNAI_ST_BAD;
    *at += 2;
    return (uint32_t)meanings[letter - letters];
  }
  code = lunai_st_hex(s + 2, end);
  if (code == LUNAI_ST_BAD) return LUNAI_ST_BAD;
  *at += 6;
  if (code < 0xD800 || code > 0xDFFF) return code;
  if (code > 0xDBFF || end - s < 12 || s[6] != '\\' || s[7] != 'u') return LUNAI_ST_BAD;
  low = lunai_st_hex(s + 8, end);
  if (low < 0xDC00 || low > 0xDFFF) return LUNAI_ST_BAD;
  *at += 6;
  return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
}

/* the order of a text, decoded (to end or its closing quote), and a UTF-8 string: by byte, which is by character */
LUNAI_FN int lunai_st_order(const char *at, const char *end, const char *string) {
  char utf8[4];
  size_t i, n;
  while (at < end && *at != '"') {
    const uint32_t code = lunai_st_character(&at, end);
    if (code == LUNAI_ST_BAD) return 1;
    n = lunai_st_encode(code, utf8);
    for (i = 0; i < n; i++, string++)
      if (*string == 0 || *string != utf8[i]) return (uint8_t)*string < (uint8_t)utf8[i] || *string == 0 ? 1 : -1;
  }
  return *string == 0 ? 0 : -1;
}
LUNAI_FN bool lunai_st_equal(lunai_st_text text, const char *string) {
  return lunai_st_order(text.at, text.at + text.size, string) == 0;
}

/* The decoded text as UTF-8 with a 0 after it, cut at a whole character to fit in room bytes; returns its full size
   without the 0, so it was not cut if that is below room. */
LUNAI_FN size_t lunai_st_decode(lunai_st_text text, char *out, size_t room) {
  const char *at = text.at, *end = text.at + text.size;
  char utf8[4];
  size_t size = 0, last = 0, n;
  while (at < end) {
    const uint32_t code = lunai_st_character(&at, end);
    if (code == LUNAI_ST_BAD) break;
    n = lunai_st_encode(code, utf8);
    if (size + n < room) {
      memcpy(out + size, utf8, n);
      last = size + n;
    }
    size += n;
  }
  if (room > 0) out[last] = 0;
  return size;
}

LUNAI_FN uint64_t lunai_hash_bytes(uint64_t h, const char *at, size_t size) { /* FNV-1a */
  size_t i;
  for (i = 0; i < size; i++) h = (h ^ (unsigned char)at[i]) * 0x100000001B3u;
  return h;
}
LUNAI_FN uint64_t lunai_hash(const char *name) { return lunai_hash_bytes(0xCBF29CE484222325u, name, strlen(name)); }
/* a text of the header as an item of an index: its hash, decoded, and where it opens */
LUNAI_FN uint64_t lunai_st_item(const lunai_st *st, lunai_st_text text) {
  const char *at = text.at, *end = text.at + text.size;
  uint64_t hash = lunai_hash("");
  char utf8[4];
  while (at < end) hash = lunai_hash_bytes(hash, utf8, lunai_st_encode(lunai_st_character(&at, end), utf8));
  return (hash >> 32) << 32 | (uint64_t)(text.at - 1 - st->header);
}
/* the order of two items: by hash, then by character, so that colliding names are only slower */
LUNAI_FN int lunai_st_compare(const lunai_st *st, uint64_t a, uint64_t b) {
  const char *p = st->header + (uint32_t)a + 1, *q = st->header + (uint32_t)b + 1, *end = st->header + st->header_size;
  if (a >> 32 != b >> 32) return a < b ? -1 : 1;
  for (;;) {
    uint32_t c, d;
    while (*p == *q && *p != '"' && *p != '\\' && (uint8_t)*p < 0x80) p++, q++;
    if (*p == '"' || *q == '"') return (*p != '"') - (*q != '"');
    c = lunai_st_character(&p, end);
    d = lunai_st_character(&q, end);
    if (c != d || c == LUNAI_ST_BAD) return c < d ? -1 : 1;
  }
}

/* The JSON of a header. The grammar nests three deep and rejects other keys and values, so nothing recurses. */
typedef struct lunai_st_json {
  const char *at, *end;
  const char *wrong;                             /* the first error, or null */
  const char *meta;                              /* where __metadata__ starts */
  size_t pairs;                                  /* in __metadata__ */
} lunai_st_json;

LUNAI_FN bool lunai_st_fail(lunai_st_json *j, const char *wrong) {
  if (!j->wrong) j->wrong = wrong;
  return false;
}
/* whether c is next after white space */
LUNAI_FN bool lunai_st_next_is(lunai_st_json *j, char c) {
  while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
  return j->at < j->end && *j->at == c;
}
LUNAI_FN bool lunai_st_skip(lunai_st_json *j, char c) {
  if (!lunai_st_next_is(j, c)) return false;
  j->at++;
  return true;
}
LUNAI_FN bool lunai_st_take(lunai_st_json *j, char c) {
  return lunai_st_skip(j, c) || lunai_st_fail(j, "the header is not the JSON of a safetensors file");
}

LUNAI_FN bool lunai_st_string(lunai_st_json *j, lunai_st_text *text) {
  if (!lunai_st_take(j, '"')) return false;
  text->at = j->at;
  while (j->at < j->end && *j->at != '"')
    if (lunai_st_character(&j->at, j->end) == LUNAI_ST_BAD)
      return lunai_st_fail(j, "a string has a control character, a bad escape or invalid UTF-8");
  text->size = (size_t)(j->at - text->at);
  return lunai_st_take(j, '"');
}

/* a list of at most `max` integers; returns how many, -1 on failure */
LUNAI_FN int lunai_st_list(lunai_st_json *j, int64_t *out, int max) {
  int count = 0;
  if (!lunai_st_take(j, '[')) return -1;
  if (lunai_st_skip(j, ']')) return 0;
  do {
    const bool zero = lunai_st_next_is(j, '0');
    const char *start = j->at;
    int64_t value = 0;
    for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
      const int digit = *j->at - '0';
      if (value > (INT64_MAX - digit) / 10) return (void)lunai_st_fail(j, "a number is too large"), -1;
      value = value * 10 + digit;
    }
    if (j->at == start || (zero && j->at - start > 1))
      return (void)lunai_st_fail(j, "a shape or data_offsets has something other than whole numbers"), -1;
    if (count == max)
      return (void)lunai_st_fail(j, "a shape has more than 8 dimensions, or data_offsets more than two numbers"), -1;
    out[count++] = value;
  } while (lunai_st_skip(j, ','));
  return lunai_st_take(j, ']') ? count : -1;
}

/* the key and the colon of an object's next member; false at the object's end, or when something is wrong */
LUNAI_FN bool lunai_st_member(lunai_st_json *j, bool first, lunai_st_text *key) {
  if (first && !lunai_st_take(j, '{')) return false;
  if (lunai_st_skip(j, '}')) return false;
  return (first || lunai_st_take(j, ',')) && lunai_st_string(j, key) && lunai_st_take(j, ':');
}

LUNAI_FN bool lunai_st_metadata(lunai_st_json *j) {
  lunai_st_text key, value;
  bool first = true;
  if (j->meta) return lunai_st_fail(j, "there is more than one __metadata__");
  if (!lunai_st_next_is(j, '{')) return lunai_st_fail(j, "__metadata__ is not an object");
  for (j->meta = j->at; lunai_st_member(j, first, &key); first = false) {
    if (!lunai_st_next_is(j, '"')) return lunai_st_fail(j, "__metadata__ holds something other than strings");
    if (!lunai_st_string(j, &value)) return false;
    j->pairs++;
  }
  return !j->wrong;
}

/* {"dtype": ..., "shape": ..., "data_offsets": ...} in any order, each once */
LUNAI_FN bool lunai_st_entry(lunai_st_json *j, lunai_st_tensor *t, int64_t offsets[2]) {
  lunai_st_text key, dtype;
  int seen = 0, part;
  bool first = true;
  for (; lunai_st_member(j, first, &key); first = false) {
    if (lunai_st_equal(key, "dtype")) {
      part = 1;
      if (!lunai_st_string(j, &dtype)) return false;
      for (t->dtype = 0; t->dtype < LUNAI_ST_DTYPES && !lunai_st_equal(dtype, lunai_st_formats[t->dtype].name);)
        t->dtype++;
      if (t->dtype == LUNAI_ST_DTYPES) return lunai_st_fail(j, "a tensor has an unknown dtype");
    } else if (lunai_st_equal(key, "shape")) {
      part = 2;
      t->rank = lunai_st_list(j, t->shape, LUNAI_ST_RANK);
      if (t->rank < 0) return false;
    } else if (lunai_st_equal(key, "data_offsets")) {
      part = 4;
      if (lunai_st_list(j, offsets, 2) != 2) return lunai_st_fail(j, "data_offsets is not two numbers");
    } else {
      return lunai_st_fail(j, "a tensor has a key other than dtype, shape and data_offsets");
    }
    if (seen & part) return lunai_st_fail(j, "a tensor has the same key twice");
    seen |= part;
  }
  return !j->wrong && (seen == 7 || lunai_st_fail(j, "a tensor lacks dtype, shape or data_offsets"));
}

LUNAI_FN bool lunai_st_place(const lunai_st *st, lunai_st_json *j, lunai_st_tensor *t, const int64_t offsets[2]) {
  int i;
  t->count = 1;
  for (i = 0; i < t->rank && t->count >= 0; i++) t->count = lunai_checked(t->count, t->shape[i]);
  if (t->count < 0) return lunai_st_fail(j, "a tensor's shape is too large");
  if (offsets[0] > offsets[1]) return lunai_st_fail(j, "a tensor ends before it begins");
  if ((uint64_t)offsets[1] > st->data_size) return lunai_st_fail(j, "a tensor lies beyond the end of the file");
  if (offsets[1] - offsets[0] != t->count * lunai_st_formats[t->dtype].size)
    return lunai_st_fail(j, "a tensor's data_offsets do not fit its dtype and shape");
  t->data = st->data + (size_t)offsets[0];
  t->bytes = (size_t)(offsets[1] - offsets[0]);
  return true;
}

LUNAI_FN bool lunai_st_read(const lunai_st *st, lunai_st_json *j, bool first, lunai_st_tensor *out) {
  int64_t offsets[2];
  for (; lunai_st_member(j, first, &out->name); first = false) {
    if (!lunai_st_equal(out->name, "__metadata__"))
      return lunai_st_entry(j, out, offsets) && lunai_st_place(st, j, out, offsets);
    if (!lunai_st_metadata(j)) return false;
  }
  return false;
}

LUNAI_FN lunai_st_json lunai_st_json_at(const lunai_st *st, size_t offset) {
  lunai_st_json j;
  j.at = st->header + offset;
  j.end = st->header + st->header_size;
  j.wrong = NULL;
  j.meta = NULL;
  j.pairs = 0;
  return j;
}

/* the next tensor in the order of the header; *cursor starts at 0 */
LUNAI_FN bool lunai_st_next(const lunai_st *st, size_t *cursor, lunai_st_tensor *out) {
  lunai_st_json j = lunai_st_json_at(st, *cursor);
  if (!lunai_st_read(st, &j, *cursor == 0, out)) return false;
  *cursor = (size_t)(j.at - st->header);
  return true;
}

/* moves the reader after the opening quote of `name`, found in the sorted items; false when absent */
LUNAI_FN bool lunai_st_look(const lunai_st *st, const uint64_t *items, size_t count, const char *name,
                            lunai_st_json *j) {
  const uint64_t hash = lunai_hash(name) >> 32;
  size_t low = 0, high = count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    int order = items[middle] >> 32 < hash ? -1 : items[middle] >> 32 > hash;
    *j = lunai_st_json_at(st, (uint32_t)items[middle]);
    if (order == 0) order = lunai_st_order(j->at + 1, j->end, name);
    if (order == 0) return true;
    if (order < 0) low = middle + 1;
    else high = middle;
  }
  return false;
}

LUNAI_FN bool lunai_st_find(const lunai_st *st, const char *name, lunai_st_tensor *out) {
  int64_t offsets[2];
  lunai_st_json j;
  size_t cursor = 0;
  if (st->names)
    return lunai_st_look(st, st->names, st->tensors, name, &j) && lunai_st_string(&j, &out->name) &&
           lunai_st_take(&j, ':') && lunai_st_entry(&j, out, offsets) && lunai_st_place(st, &j, out, offsets);
  while (lunai_st_next(st, &cursor, out))
    if (lunai_st_equal(out->name, name)) return true;
  return false;
}

LUNAI_FN bool lunai_st_meta_next(const lunai_st *st, size_t *cursor, lunai_st_text *key, lunai_st_text *value) {
  lunai_st_json j = lunai_st_json_at(st, *cursor ? *cursor : st->meta);
  if (st->meta == 0 || !lunai_st_member(&j, *cursor == 0, key) || !lunai_st_string(&j, value)) return false;
  *cursor = (size_t)(j.at - st->header);
  return true;
}

LUNAI_FN bool lunai_st_meta(const lunai_st *st, const char *key, lunai_st_text *value) {
  lunai_st_text name;
  lunai_st_json j;
  size_t cursor = 0;
  if (st->keys)
    return lunai_st_look(st, st->keys, st->pairs, key, &j) && lunai_st_string(&j, &name) &&
           lunai_st_take(&j, ':') && lunai_st_string(&j, value);
  while (lunai_st_meta_next(st, &cursor, &name, value))
    if (lunai_st_equal(name, key)) return true;
  return false;
}

/* Heapsort of numbers, or of an index's items: in place, and n log n for any input. */
LUNAI_FN int lunai_st_item_compare(const lunai_st *st, bool texts, uint64_t a, uint64_t b) {
  return texts ? lunai_st_compare(st, a, b) : (a > b) - (a < b);
}
LUNAI_FN void lunai_st_sort(const lunai_st *st, bool texts, uint64_t *items, size_t count) {
  size_t start = count / 2, end = count, root, child;
  uint64_t item;
  while (end > 1) {
    if (start > 0) item = items[--start];
    else {
      item = items[--end];
      items[end] = items[0];
    }
    for (root = start; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end && lunai_st_item_compare(st, texts, items[child], items[child + 1]) < 0) child++;
      if (lunai_st_item_compare(st, texts, item, items[child]) >= 0) break;
      items[root] = items[child];
    }
    items[root] = item;
  }
}

/* Whether tensors whose sizes add up to the data's size cover it without overlap. They do when the beginnings are
   distinct and every end is a beginning or the data's end: then none ends before the next begins, and by the sum
   none ends after it. */
LUNAI_FN bool lunai_st_covers(const lunai_st *st, uint64_t *begins) {
  lunai_st_tensor t;
  size_t cursor = 0, count = 0, i;
  while (lunai_st_next(st, &cursor, &t))
    if (t.bytes > 0) begins[count++] = (uint64_t)(t.data - st->data);
  lunai_st_sort(st, false, begins, count);
  for (i = 0; i < count; i++)
    if (i == 0 ? begins[i] != 0 : begins[i] == begins[i - 1]) return false;
  for (cursor = 0; lunai_st_next(st, &cursor, &t);) {
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

/* whether sorted items are unique */
LUNAI_FN bool lunai_st_unique(const lunai_st *st, uint64_t *items, size_t count) {
  size_t i;
  lunai_st_sort(st, true, items, count);
  for (i = 1; i < count; i++)
    if (lunai_st_compare(st, items[i - 1], items[i]) == 0) return false;
  return true;
}

/* Makes the index, in names [tensors] and keys [pairs; null: pairs are looked up by walking, and of two equal keys the
   first counts]. Tensors without data may lie anywhere. Returns null, or a sentence that says what is wrong. */
LUNAI_FN const char *lunai_st_index(lunai_st *st, uint64_t *names, uint64_t *keys) {
  lunai_st_tensor t;
  lunai_st_text key, value;
  size_t cursor, i;
  if (!st->contiguous && !lunai_st_covers(st, names)) return "two tensors overlap";
  for (cursor = 0, i = 0; lunai_st_next(st, &cursor, &t); i++) names[i] = lunai_st_item(st, t.name);
  if (!lunai_st_unique(st, names, st->tensors)) return "two tensors have the same name";
  st->names = names;
  if (!keys) return NULL;
  for (cursor = 0, i = 0; lunai_st_meta_next(st, &cursor, &key, &value); i++) keys[i] = lunai_st_item(st, key);
  if (!lunai_st_unique(st, keys, st->pairs)) return "two keys of __metadata__ are the same";
  st->keys = keys;
  return NULL;
}

/* Opens a file in memory, which must outlive it; returns null, or a sentence that says what is wrong. Whether names
   are unique and data overlap only lunai_st_index can say. */
LUNAI_FN const char *lunai_st_open(lunai_st *st, const void *bytes, size_t size) {
  lunai_st_json j;
  lunai_st_tensor t;
  uint64_t header_size = 0;
  size_t covered = 0;
  bool first = true;
  int i;
  memset(st, 0, sizeof(*st));
  if (size < 8) return "the file is shorter than 8 bytes";
  st->bytes = (const uint8_t *)bytes;
  st->size = size;
  for (i = 7; i >= 0; i--) header_size = header_size << 8 | st->bytes[i];
  if (header_size > LUNAI_ST_HEADER) return "the header is longer than 100 MB";
  if (header_size > size - 8) return "the file ends inside its header";
  st->header = (const char *)st->bytes + 8;
  st->header_size = (size_t)header_size;
  st->data = st->bytes + 8 + st->header_size;
  st->data_size = size - 8 - st->header_size;
  j = lunai_st_json_at(st, 0);
  if (header_size == 0 || *j.at != '{') return "the header does not begin with {";
  for (st->contiguous = true; lunai_st_read(st, &j, first, &t); first = false, st->tensors++) {
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

/* Numbers: byte by byte, so that neither the machine's byte order nor alignment matters. */

LUNAI_FN bool lunai_st_little(void) {
  const uint16_t one = 1;
  uint8_t low;
  memcpy(&low, &one, 1);
  return low == 1;
}

/* the value of a floating-point pattern with so many bits of exponent and mantissa */
LUNAI_FN double lunai_st_real(uint64_t bits, int exponent_bits, int mantissa_bits) {
  const int max = (1 << exponent_bits) - 1, exponent = (int)(bits >> mantissa_bits) & max;
  const uint64_t one = (uint64_t)1 << mantissa_bits, mantissa = bits & (one - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == max) return mantissa ? (double)NAN : sign * (double)INFINITY;
  return sign * ldexp((double)(exponent ? mantissa + one : mantissa),
                      (exponent ? exponent : 1) - max / 2 - mantissa_bits);
}

/* a tensor's elements as float; false when its dtype is none of F32, F16, BF16, F64 */
LUNAI_FN bool lunai_st_floats(const lunai_st_tensor *t, float *out) {
  const int size = lunai_st_formats[t->dtype].size;
  int exponent_bits = 8, mantissa_bits = 23, k;
  int64_t i;
  switch (t->dtype) {
    case LUNAI_ST_F32: break;
    case LUNAI_ST_BF16: mantissa_bits = 7; break;
    case LUNAI_ST_F16: exponent_bits = 5; mantissa_bits = 10; break;
    case LUNAI_ST_F64: exponent_bits = 11; mantissa_bits = 52; break;
    default: return false;
  }
  if (t->dtype == LUNAI_ST_F32 && sizeof(float) == 4 && lunai_st_little()) {
    if (t->bytes > 0) memcpy(out, t->data, t->bytes);
    return true;
  }
  for (i = 0; i < t->count; i++) {
    const uint8_t *at = t->data + (size_t)i * (size_t)size;
    uint64_t bits = 0;
    for (k = size - 1; k >= 0; k--) bits = bits << 8 | at[k];
    if (exponent_bits == 8 && sizeof(float) == 4) { /* a float, or its upper half: keeps NaNs as they are */
      const uint32_t pattern = (uint32_t)(bits << (23 - mantissa_bits));
      memcpy(&out[i], &pattern, sizeof(pattern));
    } else {
      out[i] = (float)lunai_st_real(bits, exponent_bits, mantissa_bits);
    }
  }
  return true;
}

/* the tensor's data in place where this machine can read it as float, else null */
LUNAI_FN const float *lunai_st_borrow(const lunai_st_tensor *t) {
  const bool fits = t->dtype == LUNAI_ST_F32 && sizeof(float) == 4 && lunai_st_little() &&
      (uintptr_t)t->data % sizeof(float) == 0;
  return fits ? (const float *)(const void *)t->data : NULL;
}

/* Writing, through a callback that takes `size` bytes or returns false. The first failure sticks. */
typedef struct lunai_st_writer {
  bool (*write)(void *user, const void *bytes, size_t size); /* null: only count */
  bool (*fetch)(void *user, float *out, const float *from, int64_t count); /* copies a tensor's elements to the host;
                                                                              null: they are read in place */
  void *user;
  uint64_t written;
  bool failed;
} lunai_st_writer;
typedef struct lunai_st_pair { const char *key, *value; } lunai_st_pair;
typedef struct lunai_st_source { const char *name; int rank; const int64_t *shape; const float *data; } lunai_st_source;

LUNAI_FN void lunai_st_write_bytes(lunai_st_writer *w, const void *bytes, size_t size) {
  if (w->failed || size == 0) return;
  w->failed = w->write && !w->write(w->user, bytes, size);
  if (!w->failed) w->written += size;
}

LUNAI_FN void lunai_st_write_text(lunai_st_writer *w, const char *text) { lunai_st_write_bytes(w, text, strlen(text)); }

LUNAI_FN void lunai_st_write_number(lunai_st_writer *w, uint64_t number) {
  char digits[20];
  size_t at = sizeof(digits);
  do digits[--at] = (char)('0' + number % 10);
  while (number /= 10);
  lunai_st_write_bytes(w, digits + at, sizeof(digits) - at);
}

LUNAI_FN void lunai_st_write_little(lunai_st_writer *w, uint64_t value, int size) {
  uint8_t bytes[8];
  int i;
  for (i = 0; i < size; i++) bytes[i] = (uint8_t)(value >> 8 * i);
  lunai_st_write_bytes(w, bytes, (size_t)size);
}

/* a UTF-8 string as JSON; invalid UTF-8 fails, as it could not be read back */
LUNAI_FN void lunai_st_write_string(lunai_st_writer *w, const char *string) {
  static const char hex[] = "0123456789abcdef";
  const char *at = string, *end = string + strlen(string), *start = string;
  char escape[6] = {'\\', 'u', '0', '0', '0', '0'};
  lunai_st_write_text(w, "\"");
  while (at < end) {
    const char *character = at;
    const uint32_t code = lunai_st_utf8(&at, end);
    if (code == LUNAI_ST_BAD) w->failed = true;
    if (w->failed) return;
    if (code >= 0x20 && code != '"' && code != '\\') continue;
    lunai_st_write_bytes(w, start, (size_t)(character - start));
    escape[4] = hex[code >> 4];
    escape[5] = hex[code & 15];
    if (code < 0x20) lunai_st_write_bytes(w, escape, 6);
    else lunai_st_write_text(w, code == '"' ? "\\\"" : "\\\\");
    start = at;
  }
  lunai_st_write_bytes(w, start, (size_t)(end - start));
  lunai_st_write_text(w, "\"");
}

LUNAI_FN void lunai_st_write_floats(lunai_st_writer *w, const float *x, int64_t count) {
  float block[1024];
  int64_t i;
  if (w->fetch) {
    lunai_st_writer local = *w;
    local.fetch = NULL;
    for (i = 0; i < count && !local.failed; i += 1024) {
      local.failed = !w->fetch(w->user, block, x + i, lunai_min(1024, count - i));
      lunai_st_write_floats(&local, block, lunai_min(1024, count - i));
    }
    w->failed = local.failed;
    w->written = local.written;
    return;
  }
  if (sizeof(float) == 4 && lunai_st_little()) {
    lunai_st_write_bytes(w, x, (size_t)count * sizeof(float));
    return;
  }
  for (i = 0; i < count; i++) {
    uint32_t pattern;
    memcpy(&pattern, &x[i], sizeof(pattern));
    lunai_st_write_little(w, pattern, 4);
  }
}

/* elements of a tensor to be written; -1: invalid */
LUNAI_FN int64_t lunai_st_source_count(const lunai_st_source *source) {
  int64_t count = 1;
  int i;
  if (source->rank < 0 || source->rank > LUNAI_ST_RANK || strcmp(source->name, "__metadata__") == 0) return -1;
  for (i = 0; i < source->rank && count >= 0; i++) count = lunai_checked(count, source->shape[i]);
  return count > 0 && !source->data ? -1 : count;
}

/* "name": {...}; begin: where the tensor's data begins. Returns where they end. */
LUNAI_FN uint64_t lunai_st_write_entry(lunai_st_writer *w, const lunai_st_source *source, uint64_t begin) {
  const int64_t count = lunai_st_source_count(source);
  const uint64_t end = begin + 4 * (uint64_t)count;
  int i;
  if (count < 0) return w->failed = true, begin;
  lunai_st_write_string(w, source->name);
  lunai_st_write_text(w, ":{\"dtype\":\"F32\",\"shape\":[");
  for (i = 0; i < source->rank; i++) {
    if (i > 0) lunai_st_write_text(w, ",");
    lunai_st_write_number(w, (uint64_t)source->shape[i]);
  }
  lunai_st_write_text(w, "],\"data_offsets\":[");
  lunai_st_write_number(w, begin);
  lunai_st_write_text(w, ",");
  lunai_st_write_number(w, end);
  lunai_st_write_text(w, "]}");
  return end;
}

LUNAI_FN void lunai_st_write_header(lunai_st_writer *w, const lunai_st_pair *metas, int64_t meta_count,
                                    const lunai_st_source *tensors, int64_t tensor_count) {
  uint64_t end = 0;
  int64_t i;
  lunai_st_write_text(w, "{");
  for (i = 0; i < meta_count; i++) {
    lunai_st_write_text(w, i == 0 ? "\"__metadata__\":{" : ",");
    lunai_st_write_string(w, metas[i].key);
    lunai_st_write_text(w, ":");
    lunai_st_write_string(w, metas[i].value);
  }
  if (meta_count > 0) lunai_st_write_text(w, "}");
  for (i = 0; i < tensor_count; i++) {
    if (i > 0 || meta_count > 0) lunai_st_write_text(w, ",");
    end = lunai_st_write_entry(w, &tensors[i], end);
  }
  lunai_st_write_text(w, "}");
}

/* A whole file. Spaces after the JSON make the data begin at a multiple of LUNAI_ALIGN, so that it can be used in
   place. Names and keys must be unique; neither they nor anything else is written when the header cannot be. */
LUNAI_FN bool lunai_st_write(lunai_st_writer *w, const lunai_st_pair *metas, int64_t meta_count,
                             const lunai_st_source *tensors, int64_t tensor_count) {
  lunai_st_writer counter;
  uint64_t size;
  int64_t i;
  memset(&counter, 0, sizeof(counter));
  lunai_st_write_header(&counter, metas, meta_count, tensors, tensor_count);
  size = (counter.written + 8 + LUNAI_ALIGN - 1) / LUNAI_ALIGN * LUNAI_ALIGN - 8;
  if (counter.failed || size > LUNAI_ST_HEADER) w->failed = true;
  lunai_st_write_little(w, size, 8);
  lunai_st_write_header(w, metas, meta_count, tensors, tensor_count);
  for (; counter.written < size; counter.written++) lunai_st_write_text(w, " ");
  for (i = 0; i < tensor_count && !w->failed; i++)
    lunai_st_write_floats(w, tensors[i].data, lunai_st_source_count(&tensors[i]));
  return !w->failed;
}

#ifdef LUNA_ONLY_STREAM
#pragma push_macro("LUNA_API")
#undef LUNA_API
#define LUNA_API LUNAI_PRIVATE
#endif
/* ---------------------------------------------------------------------------------------------------------------------
   >>threads: a pool that hands work over in microseconds (spin, then sleep). Guarded by tests/threads.c.
   ------------------------------------------------------------------------------------------------------------------ */
#if defined(LUNA_NO_THREADS) || !(defined(__GNUC__) || defined(__clang__) || defined(LUNAI_MSVC)) || \
    (!defined(_WIN32) && !defined(__unix__) && !defined(__APPLE__))
#define LUNAI_NO_POOL
#elif defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
typedef HANDLE lunai_thread;
typedef CRITICAL_SECTION lunai_mutex;
typedef CONDITION_VARIABLE lunai_condition;
#define lunai_mutex_open(m) InitializeCriticalSection(m)
#define lunai_mutex_close(m) DeleteCriticalSection(m)
#define lunai_mutex_lock(m) EnterCriticalSection(m)
#define lunai_mutex_unlock(m) LeaveCriticalSection(m)
#define lunai_condition_open(c) InitializeConditionVariable(c)
#define lunai_condition_close(c) ((void)(c))
#define lunai_condition_wait(c, m) SleepConditionVariableCS(c, m, INFINITE)
#define lunai_condition_wake(c) WakeAllConditionVariable(c)
#define lunai_yield() SwitchToThread()
#define lunai_process() ((int64_t)0) /* nothing forks */
#else
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
typedef pthread_t lunai_thread;
typedef pthread_mutex_t lunai_mutex;
typedef pthread_cond_t lunai_condition;
#define lunai_mutex_open(m) pthread_mutex_init(m, NULL)
#define lunai_mutex_close(m) pthread_mutex_destroy(m)
#define lunai_mutex_lock(m) pthread_mutex_lock(m)
#define lunai_mutex_unlock(m) pthread_mutex_unlock(m)
#define lunai_condition_open(c) pthread_cond_init(c, NULL)
#define lunai_condition_close(c) pthread_cond_destroy(c)
#define lunai_condition_wait(c, m) pthread_cond_wait(c, m)
#define lunai_condition_wake(c) pthread_cond_broadcast(c)
#define lunai_yield() sched_yield()
#define lunai_process() ((int64_t)getpid())
#endif

#ifdef LUNAI_NO_POOL
LUNAI_FN int lunai_cores(void) { return 1; }
#else
#define LUNAI_SPINS 4000

typedef struct lunai_pool lunai_pool;
typedef struct lunai_worker { lunai_pool *pool; lunai_thread thread; } lunai_worker;
struct lunai_pool {
  int64_t workers;                   /* besides the caller */
  lunai_worker *worker;
  void (*task)(void *work, int64_t index);
  void *work;
  /* atomic: the call's number in the high half, the next index to be taken in the low: a thread that comes late finds
     nothing left */
  uint64_t ticket;
  uint32_t count;                    /* atomic */
  uint32_t done;                     /* atomic */
  uint32_t sleepers;                 /* atomic */
  int64_t process;                   /* the workers': a child of fork has the pool's memory but not its threads */
  uint32_t stop;                     /* atomic */
  lunai_mutex mutex;
  lunai_condition wake;
};

LUNAI_INLINE void lunai_pause(void) {
#if defined(LUNAI_MSVC)
  YieldProcessor();
#elif defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

/* atomics, sequentially consistent */
#ifdef LUNAI_MSVC
LUNAI_INLINE uint64_t lunai_load64(uint64_t *at) {
  const uint64_t v = *(volatile uint64_t *)at; MemoryBarrier(); return v;
}
LUNAI_INLINE uint32_t lunai_load32(uint32_t *at) {
  const uint32_t v = *(volatile uint32_t *)at; MemoryBarrier(); return v;
}
LUNAI_INLINE void lunai_store64(uint64_t *at, uint64_t v) { InterlockedExchange64((volatile LONG64 *)at, (LONG64)v); }
LUNAI_INLINE void lunai_store32(uint32_t *at, uint32_t v) { InterlockedExchange((volatile LONG *)at, (LONG)v); }
LUNAI_INLINE void lunai_add32(uint32_t *at, uint32_t n) { InterlockedExchangeAdd((volatile LONG *)at, (LONG)n); }
LUNAI_INLINE bool lunai_swap64(uint64_t *at, uint64_t *expected, uint64_t v) {
  const uint64_t was = (uint64_t)InterlockedCompareExchange64((volatile LONG64 *)at, (LONG64)v, (LONG64)*expected);
  const bool same = was == *expected;
  *expected = was;
  return same;
}
#else
LUNAI_INLINE uint64_t lunai_load64(uint64_t *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
LUNAI_INLINE uint32_t lunai_load32(uint32_t *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
LUNAI_INLINE void lunai_store64(uint64_t *at, uint64_t v) { __atomic_store_n(at, v, __ATOMIC_SEQ_CST); }
LUNAI_INLINE void lunai_store32(uint32_t *at, uint32_t v) { __atomic_store_n(at, v, __ATOMIC_SEQ_CST); }
LUNAI_INLINE void lunai_add32(uint32_t *at, uint32_t n) { __atomic_add_fetch(at, n, __ATOMIC_SEQ_CST); }
LUNAI_INLINE bool lunai_swap64(uint64_t *at, uint64_t *expected, uint64_t v) {
  return __atomic_compare_exchange_n(at, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
#endif

LUNAI_FN int lunai_cores(void) {
#ifdef _WIN32
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return (int)info.dwNumberOfProcessors;
#else
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores < 1 ? 1 : cores > LUNAI_MAX_THREADS ? LUNAI_MAX_THREADS : (int)cores;
#endif
}

LUNAI_INLINE uint32_t lunai_pool_call(lunai_pool *pool) { return (uint32_t)(lunai_load64(&pool->ticket) >> 32); }

/* runs a call's remaining indices; task and work do not change until all that were taken are done */
LUNAI_FN void lunai_pool_work(lunai_pool *pool, uint32_t call) {
  uint64_t ticket = lunai_load64(&pool->ticket);
  while ((uint32_t)(ticket >> 32) == call && (uint32_t)ticket < lunai_load32(&pool->count)) {
    if (!lunai_swap64(&pool->ticket, &ticket, ticket + 1)) continue;
    pool->task(pool->work, (int64_t)(uint32_t)ticket);
    lunai_add32(&pool->done, 1);
    ticket++;
  }
}

LUNAI_FN void lunai_worker_run(lunai_worker *self) {
  lunai_pool *pool = self->pool;
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (lunai_pool_call(pool) == seen && spins < LUNAI_SPINS) {
      lunai_pause();
      spins++;
    }
    if (spins == LUNAI_SPINS) {
      lunai_mutex_lock(&pool->mutex);
      lunai_add32(&pool->sleepers, 1);
      while (lunai_pool_call(pool) == seen) lunai_condition_wait(&pool->wake, &pool->mutex);
      lunai_add32(&pool->sleepers, UINT32_MAX);
      lunai_mutex_unlock(&pool->mutex);
    }
    seen = lunai_pool_call(pool);
    if (lunai_load32(&pool->stop)) return;
    lunai_pool_work(pool, seen);
  }
}
#ifdef _WIN32
static DWORD WINAPI lunai_worker_main(LPVOID self) { lunai_worker_run((lunai_worker *)self); return 0; }
LUNAI_FN bool lunai_thread_start(lunai_worker *w) {
  return (w->thread = CreateThread(NULL, 0, lunai_worker_main, w, 0, NULL)) != NULL;
}
LUNAI_FN void lunai_thread_join(lunai_thread thread) { WaitForSingleObject(thread, INFINITE); CloseHandle(thread); }
#else
static void *lunai_worker_main(void *self) { lunai_worker_run((lunai_worker *)self); return NULL; }
LUNAI_FN bool lunai_thread_start(lunai_worker *w) {
  return pthread_create(&w->thread, NULL, lunai_worker_main, w) == 0;
}
LUNAI_FN void lunai_thread_join(lunai_thread thread) { pthread_join(thread, NULL); }
#endif

/* False in a child of fork, where there are no workers, and mutex and condition may be in any state. The process id
   is compared only where sleepers are woken or threads joined: a call's own thread runs every share that no other
   takes. */
LUNAI_FN bool lunai_pool_has_workers(const lunai_pool *pool) { return pool->process == lunai_process(); }

/* a new call of `count` tasks; returns its number */
LUNAI_FN uint32_t lunai_pool_publish(lunai_pool *pool, uint32_t count) {
  const uint32_t call = lunai_pool_call(pool) + 1;
  lunai_store32(&pool->done, 0);
  /* so that no thread pairs the new count with the old call */
  lunai_store64(&pool->ticket, (uint64_t)call << 32 | UINT32_MAX);
  lunai_store32(&pool->count, count);
  lunai_store64(&pool->ticket, (uint64_t)(call + 1) << 32);
  if (lunai_load32(&pool->sleepers) == 0 || !lunai_pool_has_workers(pool)) return call + 1;
  lunai_mutex_lock(&pool->mutex);
  lunai_condition_wake(&pool->wake);
  lunai_mutex_unlock(&pool->mutex);
  return call + 1;
}

/* a luna_parallel_for */
LUNAI_FN void lunai_pool_run(void *user, int64_t count, void (*task)(void *work, int64_t index), void *work) {
  lunai_pool *pool = (lunai_pool *)user;
  int spins = 0;
  pool->task = task;
  pool->work = work;
  lunai_pool_work(pool, lunai_pool_publish(pool, (uint32_t)count));
  while (lunai_load32(&pool->done) != (uint32_t)count) {
    lunai_pause();
    if (++spins > LUNAI_SPINS) lunai_yield();
  }
}

LUNAI_FN void lunai_pool_close(lunai_pool *pool) {
  int64_t i;
  if (!lunai_pool_has_workers(pool)) return;
  lunai_store32(&pool->stop, 1);
  lunai_pool_publish(pool, 0);
  for (i = 0; i < pool->workers; i++) lunai_thread_join(pool->worker[i].thread);
  lunai_condition_close(&pool->wake);
  lunai_mutex_close(&pool->mutex);
}

/* the caller owns the memory of pool and workers; if the system gives too few threads the pool has none */
LUNAI_FN void lunai_pool_open(lunai_pool *pool, lunai_worker *worker, int64_t workers) {
  int64_t i;
  memset(pool, 0, sizeof *pool);
  pool->worker = worker;
  pool->workers = workers;
  pool->process = lunai_process();
  lunai_mutex_open(&pool->mutex);
  lunai_condition_open(&pool->wake);
  for (i = 0; i < workers; i++) {
    worker[i].pool = pool;
    if (!lunai_thread_start(&worker[i])) break;
  }
  if (i == workers) return;
  pool->workers = i;
  lunai_pool_close(pool);
  pool->workers = 0;
}
#endif /* !LUNAI_NO_POOL */

/* ---------------------------------------------------------------------------------------------------------------------
   >>context
   All memory is persistent (parameters, moments: until close) or of the step (activations: a stack, emptied by begin).
   Both are counted in multiples of 64 bytes, alike in every mode, so that a context that measures knows exactly what a
   block must hold: there the step grows up from the block's start and what persists down from its end. Guarded by
   tests/memory.c.
   ------------------------------------------------------------------------------------------------------------------ */
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

#define LUNAI_HUGE_PAGE ((size_t)2 << 20)

typedef struct lunai_chunk {         /* header of one allocation; its memory follows, aligned, or is on the device */
  struct lunai_chunk *next;
  size_t raw_size;
  char *start;
  size_t size, used;                 /* step blocks */
  bool remote;                       /* on the device */
} lunai_chunk;
typedef struct lunai_arena {         /* the allocations of one kind of memory */
  lunai_chunk *persistent;           /* allocator mode: list, newest first */
  lunai_chunk *steps, *step;         /* allocator mode: list of step blocks, and the one in use */
  size_t persistent_bytes, step_bytes, step_peak;
  size_t gaps;                       /* between chunks, in the places of pieces */
} lunai_arena;

/* The step of a stream: what is taken lies in a row, and a scope's end moves its result down to where the scope
   began. */
typedef struct lunai_bump {
  char *start[2];                    /* small things of the host; data, null where they are only counted */
  size_t size[2], used[2], peak[2];
  bool single;                       /* the rows are single ones of their sequences: luna_op.dots */
} lunai_bump;
#ifdef LUNA_ONLY_STREAM
#define LUNAI_BUMPS(ctx) ((void)(ctx), true)
#else
#define LUNAI_BUMPS(ctx) ((ctx)->bump != NULL)
#endif

#ifdef LUNA_NO_TRAIN
typedef struct luna_optimizer luna_optimizer;
#endif
typedef struct lunai_failure {       /* of a call that makes something: set and hash say which */
  const luna_params *set;
  uint64_t hash;
  int64_t sets;                      /* that had been opened by then */
  luna_status status;
  luna_error_id id;
  char error[320];
} lunai_failure;
typedef struct lunai_sharing { struct lunai_sharing *next; const luna_ctx *owner; } lunai_sharing;

struct luna_ctx {
  luna_options options;
  const lunai_kernels *kernels;
  const luna_backend *backend;
  lunai_parallel parallel;
#ifndef LUNAI_NO_POOL
  lunai_pool *pool;
#endif
  void *self;                        /* the backend's own, of this context */
  struct lunai_sharing *sharing;     /* contexts whose parameters this one reads, where work is queued; newest first */
  char *block_start, *block_end;     /* block mode: what is left between step and persistent is free */
  lunai_arena arena[2];              /* the host's, and a device's, which holds tensors' values */
  struct lunai_bump *bump;           /* a stream's own context: all its step has; else null */
  struct lunai_piece *pieces;        /* free ones of the step's memory, from the highest place to the lowest */
  int64_t pieces_made;               /* in this step */
  luna_tensor *made;                 /* the step's newest tensor */
  char *small, *small_end;           /* what is left for small things of the host */
  size_t peak;
  luna_step_state *state;            /* in backend memory */
  luna_op *tape;
  const luna_op *custom;             /* the custom op that runs */
  uint32_t dropout_ops;
  bool training;
  bool recomputing;                  /* the step has recomputed scopes: constants that ops of the tape read stay */
  bool paused;                       /* training, but nothing joins the tape: a stream is opened */
  bool reserving;                    /* the first walk of luna_backward: memory is counted, nothing is computed */
  bool differentiated;               /* luna_backward has succeeded since begin */
  luna_tensor *reserved;             /* parameters whose first gradient that walk has allocated */
  bool stepped;                      /* an optimiser has made its step since begin */
  uint64_t reported;                 /* skipped steps that options.log has had */
  /* the first failure since begin; that of the last call which returned a status */
  luna_status status, last_status;
  luna_status open_status;                /* the device could not be opened: every call says so */
  luna_error_id error_id;            /* of: */
  char error[320];
  const char *call;                  /* the outermost init, load or save under way, which failures inside it name */
  const char *path;                  /* its file; null: bytes or luna_io */
  int setups;                        /* inits under way, one inside another */
  int64_t sets;                      /* parameter sets opened */
  lunai_failure failure;             /* the first that has not succeeded since: each begin reports it */
  uint64_t backwards;                /* luna_backward calls that succeeded */
  luna_optimizer *optimizers;        /* newest first */
  bool unread;                       /* an optimiser on a device has made a step whose result the host has not read */
  luna_graph *graphs, *graph;        /* newest first; the one that has begun, whose table is then `backend` */
};
LUNAI_FN void lunai_graph_flush(luna_ctx *ctx, const char *reason);

#ifndef LUNA_ONLY_STREAM
/* --- sentences: %s text, %d int64_t, %f double, %t a tensor's shape --- */
typedef struct lunai_text { char *at, *end; } lunai_text;
LUNAI_FN void lunai_put(lunai_text *text, const char *s) { while (*s && text->at < text->end) *text->at++ = *s++; }
LUNAI_FN void lunai_put_number(lunai_text *text, int64_t value) {
  char digits[24];
  int i = (int)sizeof digits - 1;
  uint64_t rest = value < 0 ? (uint64_t)0 - (uint64_t)value : (uint64_t)value;
  digits[i] = 0;
  do digits[--i] = (char)('0' + rest % 10); while ((rest /= 10) != 0);
  if (value < 0) digits[--i] = '-';
  lunai_put(text, digits + i);
}
/* to six decimals */
LUNAI_FN void lunai_put_real(lunai_text *text, double value) {
  int exponent = 0, digits = 6;
  double size = value < 0 ? -value : value;
  int64_t whole, part;
  char decimal[2] = { 0, 0 };
  if (value < 0) lunai_put(text, "-");
  if (!(size < (double)INFINITY)) {
    lunai_put(text, value != value ? "NaN" : "Inf");
    return;
  }
  if (size >= 1e6 || (size > 0 && size < 1e-3)) {
    for (; size >= 9.9999995; exponent++) size /= 10;
    for (; size < 0.99999995; exponent--) size *= 10;
  }
  part = (int64_t)(size * 1e6 + 0.5);
  whole = part / 1000000;
  part %= 1000000;
  lunai_put_number(text, whole);
  if (part) lunai_put(text, ".");
  for (; part && digits > 0; digits--, part = part % 100000 * 10) {
    decimal[0] = (char)('0' + part / 100000);
    lunai_put(text, decimal);
  }
  if (exponent) lunai_put(text, "e");
  if (exponent) lunai_put_number(text, exponent);
}
LUNAI_FN void lunai_put_shape(lunai_text *text, int rank, const int64_t *shape) {
  int i;
  lunai_put(text, "[");
  for (i = 0; i < rank; i++) {
    if (i) lunai_put(text, ",");
    lunai_put_number(text, shape[i]);
  }
  lunai_put(text, "]");
}
LUNAI_FN void lunai_format(char *out, size_t room, const char *format, va_list values) {
  lunai_text text;
  char one[2] = { 0, 0 };
  text.at = out;
  text.end = out + room - 1;
  for (; *format; format++) {
    if (*format != '%') {
      one[0] = *format;
      lunai_put(&text, one);
    } else if (*++format == 's') lunai_put(&text, va_arg(values, const char *));
    else if (*format == 'd') lunai_put_number(&text, va_arg(values, int64_t));
    else if (*format == 'f') lunai_put_real(&text, va_arg(values, double));
    else if (*format == 't') {
      const luna_tensor *t = va_arg(values, const luna_tensor *);
      lunai_put_shape(&text, t->rank, t->shape);
    }
  }
  *text.at = 0;
}
LUNAI_FN void lunai_print(char *out, size_t room, const char *format, ...) {
  va_list values;
  va_start(values, format);
  lunai_format(out, room, format, values);
  va_end(values);
}

/* A failure: the first since begin stays, unless the newest counts, as for a call that returns a status. */
LUNAI_FN void lunai_report(luna_ctx *ctx, bool newest, luna_error_id id, luna_status status, const char *sentence) {
  const bool open = ctx->open_status == LUNA_OK;
  if (newest) ctx->last_status = open ? status : ctx->open_status;
  if (newest && !open) return;
  if (open && (newest || ctx->status == LUNA_OK)) {
    ctx->error_id = id;
    lunai_print(ctx->error, sizeof ctx->error, "%s", sentence);
  }
  if (open && ctx->status == LUNA_OK) ctx->status = status;
  if (ctx->options.log) ctx->options.log(ctx->options.log_user, status, sentence);
}
LUNAI_FN void lunai_report_values(luna_ctx *ctx, bool newest, int id, va_list values) {
  char sentence[sizeof ctx->error];
  lunai_format(sentence, sizeof sentence, lunai_sentences[id], values);
  lunai_report(ctx, newest, (luna_error_id)id, (luna_status)lunai_statuses[id], sentence);
}
/* An op's failure, a LUNA_ERROR_... with its sentence's values. Returns null, for `return lunai_fail(...)`. */
LUNAI_FN luna_tensor *lunai_fail(luna_ctx *ctx, int id, ...) {
  va_list values;
  va_start(values, id);
  lunai_report_values(ctx, false, id, values);
  va_end(values);
  return NULL;
}
/* The failure of a call that returns a status or makes a parameter: always its own sentence. */
LUNAI_FN luna_status lunai_fail_status(luna_ctx *ctx, int id, ...) {
  va_list values;
  va_start(values, id);
  lunai_report_values(ctx, true, id, values);
  va_end(values);
  return ctx->last_status;
}
/* what the backend did not say itself */
LUNAI_FN luna_tensor *lunai_fail_backend(luna_ctx *ctx, bool newest, const char *name, luna_status status) {
  char sentence[sizeof ctx->error];
  lunai_print(sentence, sizeof sentence, lunai_sentences[LUNA_ERROR_BACKEND], name, luna_status_text(status));
  lunai_report(ctx, newest, LUNA_ERROR_BACKEND, status, sentence);
  return NULL;
}
/* reports what a backend call returned, for `return`; the backend's own sentence stays */
LUNAI_FN luna_status lunai_backend_result(luna_ctx *ctx, const char *name, luna_status status) {
  if (status == LUNA_OK) return LUNA_OK;
  if (ctx->status != LUNA_OK) return ctx->last_status = ctx->status;
  lunai_fail_backend(ctx, true, name, status);
  return ctx->last_status;
}
#else /* no sentences: what a stream runs has been checked */
LUNAI_INLINE luna_tensor *lunai_fail_backend(luna_ctx *ctx, bool newest, const char *name, luna_status status) {
  (void)ctx; (void)newest; (void)name; (void)status;
  return NULL;
}
LUNAI_INLINE luna_status lunai_backend_result(luna_ctx *ctx, const char *name, luna_status status) {
  (void)ctx; (void)name;
  return status;
}
LUNAI_INLINE luna_tensor *lunai_fail(luna_ctx *ctx, int id, ...) { (void)ctx; (void)id; return NULL; }
LUNAI_INLINE void lunai_report_values(luna_ctx *ctx, bool newest, int id, va_list values) {
  (void)ctx; (void)newest; (void)id; (void)values;
}
LUNAI_INLINE luna_status lunai_fail_status(luna_ctx *ctx, int id, ...) {
  (void)ctx; (void)id; return LUNA_BAD_ARGUMENT;
}
LUNAI_INLINE void lunai_report(luna_ctx *ctx, bool newest, luna_error_id id, luna_status status, const char *sentence) {
  (void)newest; (void)id; (void)sentence;
  ctx->status = status;
}
LUNAI_INLINE void lunai_print(char *out, size_t room, const char *format, ...) { (void)room; (void)format; *out = 0; }
#endif
LUNAI_FN luna_status lunai_fail_memory(luna_ctx *ctx, const char *name, size_t bytes) {
  return lunai_fail_status(ctx, LUNA_ERROR_NO_MEMORY, name, (int64_t)bytes, (int64_t)luna_memory(ctx).current);
}
LUNAI_FN luna_tensor *lunai_fail_op_memory(luna_ctx *ctx, const char *name, size_t bytes) {
  return lunai_fail(ctx, LUNA_ERROR_NO_MEMORY, name, (int64_t)bytes, (int64_t)luna_memory(ctx).current);
}
/* a null input: its own failure is already reported, or this is the first */
LUNAI_FN luna_tensor *lunai_fail_null(luna_ctx *ctx, const char *name, const char *what) {
  return ctx->status == LUNA_OK ? lunai_fail(ctx, LUNA_ERROR_NULL_ARGUMENT, name, what) : NULL;
}

/* --- what configs may hold: true, or false with a sentence --- */
LUNAI_FN bool lunai_in(luna_ctx *ctx, const char *name, const char *field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return true;
  return lunai_fail_status(ctx, LUNA_ERROR_VALUE_RANGE, name, field, value, min, max) == LUNA_OK;
}
LUNAI_FN bool lunai_is_given(luna_ctx *ctx, const char *name, const char *what, bool given) {
  return given || lunai_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, name, what) == LUNA_OK;
}
LUNAI_FN bool lunai_is_probability(luna_ctx *ctx, const char *name, const char *field, float value) {
  if (value >= 0 && value < 1) return true;
  return lunai_fail_status(ctx, LUNA_ERROR_PROBABILITY, name, field, (double)value) == LUNA_OK;
}
LUNAI_FN bool lunai_is_rate(luna_ctx *ctx, const char *name, const char *field, float value) {
  if (value >= 0 && value < (float)INFINITY) return true;
  return lunai_fail_status(ctx, LUNA_ERROR_NEGATIVE, name, field, (double)value) == LUNA_OK;
}

/* Names the call that failures inside are of, unless that is inside another. Returns the outer one, for lunai_leave. */
LUNAI_FN const char *lunai_enter(luna_ctx *ctx, const char *name) {
  const char *outer = ctx->call;
  if (!outer) ctx->call = name;
  return outer;
}
LUNAI_FN void lunai_leave(luna_ctx *ctx, const char *outer) { ctx->call = outer; }
LUNAI_FN const char *lunai_file_name(const luna_ctx *ctx) { return ctx->path ? ctx->path : "the file"; }

/* --- memory --- */
LUNAI_FN void *lunai_raw_allocate(const luna_allocator *a, size_t bytes) {
  return a->allocate ? a->allocate(a->user, bytes) : LUNA_MALLOC(bytes);
}
LUNAI_FN void lunai_raw_release(const luna_allocator *a, void *at, size_t bytes) {
  if (a->allocate) a->release(a->user, at, bytes);
  else LUNA_FREE(at);
}

/* values are in memory that the host cannot read */
#ifdef LUNA_ONLY_STREAM
#define lunai_on_device(ctx) ((void)(ctx), false)
#else
LUNAI_FN bool lunai_on_device(const luna_ctx *ctx) { return ctx->backend->allocate && !ctx->options.measure; }
#endif
/* false: data pointers may be null, only sizes are used */
LUNAI_FN bool lunai_computes(const luna_ctx *ctx) { return !ctx->options.measure && !ctx->reserving; }
LUNAI_FN bool lunai_queues(const luna_ctx *ctx) {
  return ctx->backend->wait && !ctx->options.measure && ctx->open_status == LUNA_OK;
}
LUNAI_FN size_t lunai_used(const luna_ctx *ctx) {
  return ctx->arena[0].persistent_bytes + ctx->arena[0].step_bytes + ctx->arena[1].persistent_bytes +
      ctx->arena[1].step_bytes;
}

#ifndef LUNAI_SEPARATE
#define LUNAI_SEPARATE false         /* tests/cuda.c: each tensor of a device alone in an allocation of its size */
#endif

LUNAI_FN lunai_chunk *lunai_chunk_open(const luna_ctx *ctx, bool remote, size_t size) {
  const size_t align = !remote && size >= 2 * LUNAI_HUGE_PAGE ? LUNAI_HUGE_PAGE : LUNAI_ALIGN;
  const size_t raw_size = (remote ? 0 : size) + sizeof(lunai_chunk) + align;
  char *raw = raw_size < sizeof(lunai_chunk) + align ? NULL :
      (char *)lunai_raw_allocate(&ctx->options.allocator, raw_size);
  lunai_chunk *chunk = (lunai_chunk *)(void *)raw;
  if (!raw) return NULL;
  chunk->next = NULL;
  chunk->raw_size = raw_size;
  chunk->start = raw + sizeof(lunai_chunk);
  chunk->start += (align - (uintptr_t)chunk->start % align) % align;
  chunk->size = size;
  chunk->used = 0;
  chunk->remote = remote;
  if (remote && (chunk->start = (char *)ctx->backend->allocate(ctx->self, size)) == NULL) {
    lunai_raw_release(&ctx->options.allocator, raw, raw_size);
    return NULL;
  }
#ifdef MADV_HUGEPAGE
  if (align == LUNAI_HUGE_PAGE) (void)madvise(chunk->start, size, MADV_HUGEPAGE);
#endif
  return chunk;
}
/* Releases the first chunk of a list; all it needs is passed, as the chunk may hold the context itself. */
LUNAI_FN void lunai_chunk_close(lunai_chunk **list, luna_allocator allocator, const luna_backend *backend, void *self) {
  lunai_chunk *chunk = *list;
  *list = chunk->next;
  if (chunk->remote) backend->release(self, chunk->start, chunk->size);
  lunai_raw_release(&allocator, chunk, chunk->raw_size);
}

LUNAI_FN bool lunai_room(const luna_ctx *ctx, size_t bytes) {
  return bytes <= (ctx->options.block ? (size_t)(ctx->block_end - ctx->block_start) : SIZE_MAX / 2) - lunai_used(ctx);
}
LUNAI_FN void lunai_count_peak(luna_ctx *ctx, lunai_arena *arena) {
  const size_t used = lunai_used(ctx);
  if (used > ctx->peak) ctx->peak = used;
  if (arena->step_bytes > arena->step_peak) arena->step_peak = arena->step_bytes;
}

/* Memory until close, zeroed. `data`: only counted when measuring (then *out is null), and on the device of a context
   that has one. False: none left. */
LUNAI_FN bool lunai_persist(luna_ctx *ctx, size_t bytes, bool data, void **out) {
  const size_t size = lunai_round(bytes);
  const bool remote = data && lunai_on_device(ctx);
  lunai_arena *arena = &ctx->arena[remote];
  *out = NULL;
  if (size < bytes || !lunai_room(ctx, size)) return false;
  if (!(data && ctx->options.measure)) {
    if (ctx->options.block) *out = ctx->block_end - arena->persistent_bytes - size;
    else {
      lunai_chunk *chunk = lunai_chunk_open(ctx, remote, remote && LUNAI_SEPARATE ? bytes : size);
      if (!chunk) return false;
      chunk->next = arena->persistent;
      arena->persistent = chunk;
      *out = chunk->start;
    }
    if (!remote) memset(*out, 0, size);
    else if (ctx->backend->zero(ctx, *out, remote && LUNAI_SEPARATE ? bytes : size) != LUNA_OK) {
      lunai_chunk_close(&arena->persistent, ctx->options.allocator, ctx->backend, ctx->self);
      return false;
    }
  }
  arena->persistent_bytes += size;
  lunai_count_peak(ctx, arena);
  return true;
}

typedef struct lunai_persistent_mark { lunai_chunk *newest[2]; size_t bytes[2]; } lunai_persistent_mark;
LUNAI_FN lunai_persistent_mark lunai_persistent(const luna_ctx *ctx) {
  lunai_persistent_mark mark;
  int i;
  for (i = 0; i < 2; i++) {
    mark.newest[i] = ctx->arena[i].persistent;
    mark.bytes[i] = ctx->arena[i].persistent_bytes;
  }
  return mark;
}
LUNAI_FN void lunai_persistent_rewind(luna_ctx *ctx, lunai_persistent_mark mark) {
  int i;
  lunai_graph_flush(ctx, "memory of its work was given back");
  for (i = 0; i < 2; i++) {
    while (ctx->arena[i].persistent != mark.newest[i])
      lunai_chunk_close(&ctx->arena[i].persistent, ctx->options.allocator, ctx->backend, ctx->self);
    ctx->arena[i].persistent_bytes = mark.bytes[i];
  }
}

typedef struct lunai_mark {
  lunai_chunk *step[2];
  size_t used[2], bytes[2], gaps[2];
  int64_t pieces_made;
  luna_tensor *made;
  char *small, *small_end;
} lunai_mark;
LUNAI_FN lunai_mark lunai_step_mark(const luna_ctx *ctx) {
  lunai_mark mark;
  int i;
  if (LUNAI_BUMPS(ctx)) {            /* the rest is not read */
    mark.bytes[0] = ctx->bump->used[0];
    mark.bytes[1] = ctx->bump->used[1];
    return mark;
  }
  for (i = 0; i < 2; i++) {
    const lunai_arena *arena = &ctx->arena[i];
    mark.step[i] = arena->step;
    mark.used[i] = arena->step ? arena->step->used : 0;
    mark.bytes[i] = arena->step_bytes;
    mark.gaps[i] = arena->gaps;
  }
  mark.pieces_made = ctx->pieces_made;
  mark.made = ctx->made;
  mark.small = ctx->small;
  mark.small_end = ctx->small_end;
  return mark;
}
LUNAI_FN void lunai_release(luna_tensor *t);
LUNAI_FN void lunai_pieces_rewind(luna_ctx *ctx, lunai_mark mark);
LUNAI_FN void lunai_step_rewind(luna_ctx *ctx, lunai_mark mark) {
  lunai_chunk *chunk;
  int i;
  if (LUNAI_BUMPS(ctx)) {
    ctx->bump->used[0] = mark.bytes[0];
    ctx->bump->used[1] = mark.bytes[1];
    return;
  }
  for (; ctx->made != mark.made; ctx->made = ctx->made->older) lunai_release(ctx->made);
  lunai_pieces_rewind(ctx, mark);
  for (i = 0; i < 2; i++) {
    lunai_arena *arena = &ctx->arena[i];
    for (chunk = mark.step[i] ? mark.step[i]->next : arena->steps; chunk; chunk = chunk->next) chunk->used = 0;
    arena->step = mark.step[i] ? mark.step[i] : arena->steps;
    if (mark.step[i]) mark.step[i]->used = mark.used[i];
    arena->step_bytes = mark.bytes[i];
    arena->gaps = mark.gaps[i];
  }
  ctx->small = mark.small;
  ctx->small_end = mark.small_end;
}

/* the first chunk from the current one on that has `size` bytes left, else a new last one of `grown` bytes or more */
LUNAI_FN lunai_chunk *lunai_chunk_for(luna_ctx *ctx, bool remote, size_t size, size_t grown) {
  lunai_arena *arena = &ctx->arena[remote];
  const bool alone = remote && LUNAI_SEPARATE;
  lunai_chunk *chunk = arena->step, **last = &arena->steps;
  while (chunk && (alone ? chunk->size != size || chunk->used > 0 : chunk->size - chunk->used < size))
    chunk = chunk->next;
  if (chunk) return chunk;
  chunk = lunai_chunk_open(ctx, remote, alone || size > grown ? size : grown);
  if (!chunk && grown > size) chunk = lunai_chunk_open(ctx, remote, size);
  while (*last) last = &(*last)->next;
  *last = chunk;
  return chunk;
}
LUNAI_FN void *lunai_step_from_chunks(luna_ctx *ctx, bool remote, size_t size) {
  /* outside training free pieces are joined, though not across chunks: up to 64 MB more at a time, until the next
     begin; of a device, where memory is short, little more than is asked for */
  const size_t min = (size_t)1 << 16, more = (size_t)64 << 20, used = ctx->arena[remote].step_bytes;
  const size_t host = used + (ctx->training ? 0 : 7 * used < more ? 7 * used : more);
  const size_t bytes = !remote ? host : ctx->training ? 0 : used / 16;
  lunai_chunk *chunk = lunai_chunk_for(ctx, remote, size, bytes > min && lunai_computes(ctx) ? bytes : min);
  if (!chunk) return NULL;
  if (ctx->arena[remote].step != chunk) ctx->arena[remote].gaps += LUNAI_ALIGN;
  ctx->arena[remote].step = chunk;
  chunk->used += size;
  return chunk->start + chunk->used - size;
}
/* Ensures that the step can grow by `size` bytes in any pieces: they need not end a chunk exactly, as a following
   one holds them all. */
LUNAI_FN bool lunai_step_reserve(luna_ctx *ctx, bool remote, size_t size) {
  if (!lunai_room(ctx, size)) return false;
  if (size == 0 || ctx->options.measure || ctx->options.block || (remote && LUNAI_SEPARATE)) return true;
  return lunai_chunk_for(ctx, remote, size, 0) != NULL;
}

LUNAI_FN bool lunai_bump_take(lunai_bump *b, bool data, size_t bytes, void **out) {
  const size_t align = data ? LUNAI_ALIGN : 16, size = (bytes + align - 1) & ~(align - 1);
  *out = NULL;
  if (size < bytes || size > b->size[data] - b->used[data]) return false;
  if (b->start[data]) *out = b->start[data] + b->used[data];
  b->used[data] += size;
  if (b->used[data] > b->peak[data]) b->peak[data] = b->used[data];
  return true;
}
/* Memory of the step, not zeroed; `data` as above. */
LUNAI_FN bool lunai_step(luna_ctx *ctx, size_t bytes, bool data, void **out) {
  const size_t size = lunai_round(bytes);
  bool remote;
  lunai_arena *arena;
  if (LUNAI_BUMPS(ctx)) return lunai_bump_take(ctx->bump, data, bytes, out);
  remote = data && lunai_on_device(ctx);
  arena = &ctx->arena[remote];
  *out = NULL;
  if (size < bytes || !lunai_room(ctx, size)) return false;
  if ((!data || lunai_computes(ctx)) && size > 0) {
    if (ctx->options.block) *out = ctx->block_start + arena->step_bytes;
    else if ((*out = lunai_step_from_chunks(ctx, remote, remote && LUNAI_SEPARATE ? bytes : size)) == NULL)
      return false;
  }
  arena->step_bytes += size;
  lunai_count_peak(ctx, arena);
  return true;
}

/* Small things of the host that last until the next begin lie together, so that they part no pieces. */
#define LUNAI_SMALL 2048
LUNAI_FN bool lunai_step_small(luna_ctx *ctx, size_t bytes, void **out) {
  const size_t size = (bytes + 15) / 16 * 16;
  void *memory;
  if (LUNAI_BUMPS(ctx) || size > LUNAI_SMALL / 2) return lunai_step(ctx, bytes, false, out);
  if (!ctx->small || (size_t)(ctx->small_end - ctx->small) < size) {
    if (!lunai_step(ctx, LUNAI_SMALL, false, &memory)) return false;
    ctx->small = (char *)memory;
    ctx->small_end = ctx->small + LUNAI_SMALL;
  }
  *out = ctx->small;
  ctx->small += size;
  return true;
}

/* Pieces of the step's memory, which tensors' data and gradients lie in, and which can be released before the step
   ends. In training most sizes come again, and pieces stay as they are; else they are cut up and joined. Places count
   bytes from the step's start, alike in every mode, and so do all decisions. */
typedef struct lunai_piece {
  struct lunai_piece *next, *next_before; /* of the free ones; before luna_backward counted what it needs */
  char *at;                          /* null where memory is only counted */
  size_t place, size;
  int64_t number;                    /* of those made in this step */
} lunai_piece;
LUNAI_FN lunai_piece *lunai_piece_make(luna_ctx *ctx, char *at, size_t place, size_t size) {
  lunai_piece *piece;
  void *memory;
  if (!lunai_step_small(ctx, sizeof(lunai_piece), &memory)) return NULL;
  piece = (lunai_piece *)memory;
  memset(piece, 0, sizeof *piece);
  piece->at = at;
  piece->place = place;
  piece->size = size;
  piece->number = ctx->pieces_made++;
  return piece;
}
LUNAI_FN bool lunai_pieces_alone(const luna_ctx *ctx) { return LUNAI_SEPARATE && lunai_on_device(ctx); }
LUNAI_FN bool lunai_pieces_split(const luna_ctx *ctx) {
  return !LUNAI_BUMPS(ctx) && !ctx->training && !lunai_pieces_alone(ctx);
}
/* the smallest free piece that is large enough; else a new one */
LUNAI_FN lunai_piece *lunai_piece_take(luna_ctx *ctx, size_t bytes) {
  const size_t size = lunai_pieces_alone(ctx) ? bytes : lunai_round(bytes);
  const size_t slack = lunai_pieces_split(ctx) ? 24 * size : lunai_pieces_alone(ctx) ? 0 : size / 8; /* too large by */
  lunai_arena *arena = &ctx->arena[lunai_on_device(ctx)];
  lunai_piece **link, **best = NULL, *piece, *rest;
  void *at;
  for (link = &ctx->pieces; *link; link = &(*link)->next)
    if ((*link)->size >= size && (*link)->size - size <= slack && (!best || (*link)->size < (*best)->size)) best = link;
  if (!best) {
    piece = lunai_piece_make(ctx, NULL, 0, size);
    if (!piece || !lunai_step(ctx, bytes, true, &at)) return NULL;
    piece->at = (char *)at;
    piece->place = arena->step_bytes + arena->gaps - lunai_round(bytes);
    return piece;
  }
  piece = *best;
  if (piece->size > size && lunai_pieces_split(ctx)) {
    rest = lunai_piece_make(ctx, piece->at ? piece->at + size : NULL, piece->place + size, piece->size - size);
    if (!rest) return NULL;
    rest->next = piece->next;
    piece->size = size;
    *best = rest;
  } else *best = piece->next;
  return piece;
}
/* free neighbours become one, the lower */
LUNAI_FN void lunai_piece_give(luna_ctx *ctx, lunai_piece **given) {
  lunai_piece *piece = *given, **link = &ctx->pieces, **above = NULL;
  if (!piece) return;
  *given = NULL;
  for (; *link && (*link)->place > piece->place; link = &(*link)->next) above = link;
  if (lunai_pieces_split(ctx) && above && piece->place + piece->size == (*above)->place) {
    piece->size += (*above)->size;
    *above = *link;
    link = above;
  }
  if (lunai_pieces_split(ctx) && *link && (*link)->place + (*link)->size == piece->place) (*link)->size += piece->size;
  else {
    piece->next = *link;
    *link = piece;
  }
}
/* What was free before the mark, less what has been taken and not given back since */
LUNAI_FN void lunai_pieces_rewind(luna_ctx *ctx, lunai_mark mark) {
  const size_t end = mark.bytes[lunai_on_device(ctx)] + mark.gaps[lunai_on_device(ctx)];
  lunai_piece **link = &ctx->pieces;
  while (*link) {
    if ((*link)->number >= mark.pieces_made || (*link)->place >= end) *link = (*link)->next;
    else {
      if ((*link)->place + (*link)->size > end) (*link)->size = end - (*link)->place;
      link = &(*link)->next;
    }
  }
  ctx->pieces_made = mark.pieces_made;
}

/* Empties the step; several blocks become one of their sum, so that a steady step allocates nothing. */
LUNAI_FN void lunai_step_clear(luna_ctx *ctx) {
  lunai_mark nothing;
  int i;
  memset(&nothing, 0, sizeof nothing);
  lunai_step_rewind(ctx, nothing);
  for (i = 0; i < 2 && !ctx->options.measure; i++) { /* a measuring context owns nothing that it counts */
    lunai_arena *arena = &ctx->arena[i];
    if (!arena->steps || !arena->steps->next) continue;
    lunai_graph_flush(ctx, "memory of its work was given back");
    while (arena->steps) lunai_chunk_close(&arena->steps, ctx->options.allocator, ctx->backend, ctx->self);
    arena->steps = arena->step = i == 1 && LUNAI_SEPARATE ? NULL : lunai_chunk_open(ctx, i == 1, arena->step_peak);
  }
}

LUNA_API luna_memory_usage luna_memory(const luna_ctx *ctx) {
  luna_memory_usage use;
  use.current = use.peak = 0;
  if (!ctx) return use;
  use.current = lunai_used(ctx) + (LUNAI_ALIGN - 1); /* a block may have any alignment */
  use.peak = ctx->peak + (LUNAI_ALIGN - 1);
  return use;
}

/* --- open and close --- */
LUNA_API void luna_close(luna_ctx *ctx) {
  const luna_backend *backend;
  lunai_arena arena[2];
  luna_allocator allocator;
  void *self;
  int i;
  if (!ctx) return;
  while (ctx->graphs) luna_graph_close(ctx->graphs);
#ifndef LUNAI_NO_POOL
  if (ctx->pool) lunai_pool_close(ctx->pool);
#endif
  if (ctx->options.block) return;
  allocator = ctx->options.allocator;
  backend = ctx->backend;
  self = ctx->self;
  memcpy(arena, ctx->arena, sizeof arena);
  for (i = 1; i >= 0; i--) {
    if (i == 0 && self) backend->close(self);
    while (arena[i].steps) lunai_chunk_close(&arena[i].steps, allocator, backend, self);
    /* the host's oldest holds ctx itself */
    while (arena[i].persistent) lunai_chunk_close(&arena[i].persistent, allocator, backend, self);
  }
}

LUNAI_FN bool lunai_open_threads(luna_ctx *ctx) {
  const luna_options *o = &ctx->options;
  int threads = o->threads > 0 ? o->threads : o->parallel_for ? 1 : lunai_cores();
  void *memory;
  if (threads > LUNAI_MAX_THREADS) threads = LUNAI_MAX_THREADS;
  ctx->parallel.run = o->parallel_for;
  ctx->parallel.user = o->parallel_user;
  ctx->parallel.threads = threads;
  if (o->parallel_for || threads == 1) return true;
#ifdef LUNAI_NO_POOL
  (void)memory;
  ctx->parallel.threads = 1;
#else
  if (!lunai_persist(ctx, lunai_round(sizeof(lunai_pool)) + (size_t)(threads - 1) * sizeof(lunai_worker), false,
                     &memory)) return false;
  if (o->measure) return true;
  lunai_pool_open((lunai_pool *)memory, (lunai_worker *)(void *)((char *)memory + lunai_round(sizeof(lunai_pool))),
                  threads - 1);
  if (((lunai_pool *)memory)->workers == 0) return true;
  ctx->pool = (lunai_pool *)memory;
  ctx->parallel.run = lunai_pool_run;
  ctx->parallel.user = memory;
#endif
  return true;
}

LUNA_API luna_ctx *luna_open(const luna_options *options) {
  luna_ctx first, *ctx;
  luna_status open_status = LUNA_OK;
  void *memory;
  memset(&first, 0, sizeof first);
  if (options) first.options = *options;
  first.kernels = lunai_kernels_of(first.options.isa);
  first.backend = first.options.backend ? first.options.backend : luna_cpu_backend();
  if (!first.kernels || first.options.threads < 0 ||
      !first.options.allocator.allocate != !first.options.allocator.release) return NULL;
  if ((unsigned)first.options.form > LUNA_FORM_FOLDED) return NULL;
  if (first.backend->version != 1 || first.backend->size != sizeof(luna_backend)) return NULL;
  if (first.options.block && lunai_on_device(&first)) return NULL;
  if (first.options.block) {
    char *start = (char *)first.options.block;
    const size_t shift = (LUNAI_ALIGN - (uintptr_t)start % LUNAI_ALIGN) % LUNAI_ALIGN;
    if (first.options.block_size < shift) return NULL;
    first.block_start = start + shift;
    first.block_end = first.block_start + (first.options.block_size - shift) / LUNAI_ALIGN * LUNAI_ALIGN;
  }
  if (!lunai_persist(&first, sizeof first, false, &memory)) return NULL;
  ctx = (luna_ctx *)memory;
  *ctx = first;
  if (ctx->backend->allocate) ctx->arena[1].persistent_bytes = lunai_round(ctx->backend->opened);
  if (ctx->backend->open && !ctx->options.measure)
    open_status = ctx->backend->open(ctx, ctx->backend->device, &ctx->self);
  if (open_status != LUNA_OK) {
    if (ctx->status == LUNA_OK) luna_backend_fail(ctx, open_status, "luna_open: the device could not be opened");
    ctx->open_status = open_status;
    return ctx;
  }
  if (!lunai_persist(ctx, sizeof(luna_step_state), !ctx->options.measure, &memory) || !lunai_open_threads(ctx)) {
    luna_close(ctx);
    return NULL;
  }
  ctx->state = (luna_step_state *)memory;
  if (!ctx->options.measure)
    open_status = ctx->backend->copy(ctx, &ctx->state->seed, &ctx->options.seed, sizeof ctx->options.seed, 1);
  if (open_status != LUNA_OK && ctx->status == LUNA_OK)
    luna_backend_fail(ctx, open_status, "luna_open: the device could not be opened");
  ctx->open_status = open_status;
  return ctx;
}

/* On a device: orders what this context does next after what the owners of its shared sets have queued. */
LUNAI_FN luna_status lunai_wait_for_owners(luna_ctx *ctx) {
  luna_status status = LUNA_OK;
  const lunai_sharing *one;
  for (one = ctx->sharing; one && status == LUNA_OK; one = one->next) status = ctx->backend->wait(ctx, one->owner);
  return status;
}

LUNAI_FN luna_status lunai_begin(luna_ctx *ctx, bool training) {
  luna_status status;
  bool repeated;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (ctx->open_status != LUNA_OK) return ctx->open_status;
  repeated = ctx->training && ctx->status != LUNA_OK && !ctx->differentiated; /* keeps its number: the same dropout */
  lunai_step_clear(ctx);
  ctx->tape = NULL;
  ctx->dropout_ops = 0;
  ctx->training = training;
  ctx->paused = ctx->recomputing = ctx->differentiated = false;
  ctx->status = ctx->failure.status;
  ctx->error_id = ctx->failure.id;
  memcpy(ctx->error, ctx->failure.error, sizeof ctx->error);
  status = lunai_wait_for_owners(ctx);
  if (status == LUNA_OK && !ctx->options.measure)
    status = ctx->backend->begin(ctx, ctx->state, training && !repeated, ctx->stepped);
  ctx->stepped = false;
  status = lunai_backend_result(ctx, training ? "luna_begin_step" : "luna_begin_inference", status);
  return status == LUNA_OK ? ctx->status : status;
}
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_begin_step(luna_ctx *ctx) { return lunai_begin(ctx, true); }
#endif
LUNA_API luna_status luna_begin_inference(luna_ctx *ctx) { return lunai_begin(ctx, false); }
LUNA_API luna_status luna_ctx_status(const luna_ctx *ctx) { return ctx ? ctx->status : LUNA_BAD_ARGUMENT; }
#ifndef LUNA_ONLY_STREAM
LUNA_API const char *luna_error(const luna_ctx *ctx) {
  return ctx ? ctx->error : lunai_sentences[LUNA_ERROR_NO_CONTEXT];
}
#endif
LUNA_API luna_error_id luna_ctx_error_id(const luna_ctx *ctx) { return ctx ? ctx->error_id : LUNA_ERROR_NO_CONTEXT; }
LUNA_API void *luna_backend_self(const luna_ctx *ctx) { return ctx ? ctx->self : NULL; }
LUNA_API luna_step_state *luna_backend_state(const luna_ctx *ctx) { return ctx ? ctx->state : NULL; }
LUNA_API luna_status luna_backend_fail(luna_ctx *ctx, luna_status status, const char *sentence) {
  const bool newest = ctx && ctx->setups > 0; /* the sentence of the init under way */
  if (ctx) lunai_report(ctx, newest, LUNA_ERROR_BACKEND, status, sentence ? sentence : luna_status_text(status));
  return status;
}
/* reads the state; waits for the device */
LUNAI_FN luna_step_state lunai_state_of(luna_ctx *ctx, const luna_step_state *state) {
  luna_step_state now;
  memset(&now, 0, sizeof now);
  if (state && !ctx->options.measure) ctx->backend->copy(ctx, &now, state, sizeof now, 2);
  return now;
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>backend: the ops on the CPU. Each fills kernel arguments from its op; in this order: query, forward, backward.
   Guarded by tests/ops.c (against the reference) and tests/gradients.c (finite differences).
   ------------------------------------------------------------------------------------------------------------------ */
/* columns of the table of ops */
#define LUNAI_OP_KIND(name, tier, reads, cheap) reads,
#define LUNAI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) reads,
static const int lunai_op_reads[] = { LUNA_OPS(LUNAI_OP_KIND, LUNAI_OP_EACH) };
#undef LUNAI_OP_EACH
#undef LUNAI_OP_KIND
#define LUNAI_OP_KIND(name, tier, reads, cheap) cheap,
#define LUNAI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) cheap,
static const bool lunai_op_is_cheap[] = { LUNA_OPS(LUNAI_OP_KIND, LUNAI_OP_EACH) };
#undef LUNAI_OP_EACH
#undef LUNAI_OP_KIND

#define LUNAI_SPLIT 8192             /* elements worth handing to a thread */

/* body(op, first, last) over [0, count) in shares of whole units */
typedef struct lunai_split_work {
  luna_op *op;
  void (*body)(luna_op *op, int64_t first, int64_t last);
  int64_t count, unit;
} lunai_split_work;
LUNAI_FN void lunai_split_task(void *work, int64_t thread, int64_t threads) {
  const lunai_split_work *w = (const lunai_split_work *)work;
  const int64_t units = lunai_divide_up(w->count, w->unit);
  const int64_t first = lunai_share(units, thread, threads) * w->unit;
  const int64_t last = lunai_min(lunai_share(units, thread + 1, threads) * w->unit, w->count);
  if (first < last) w->body(w->op, first, last);
}
LUNAI_FN void lunai_split(luna_op *op, int64_t count, int64_t width,
                          void (*body)(luna_op *op, int64_t first, int64_t last)) {
  lunai_split_work w;
  w.op = op;
  w.body = body;
  w.count = count;
  w.unit = lunai_max(1, LUNAI_SPLIT / lunai_max(1, width));
#ifdef LUNA_ONLY_STREAM
  if (count > 0) body(op, 0, count);
  return;
#endif
  if (count <= w.unit) {
    if (count > 0) body(op, 0, count);
  } else lunai_run(&op->ctx->parallel, lunai_split_task, &w);
}

LUNAI_INLINE const lunai_kernels *lunai_k(const luna_op *op) { return op->ctx->kernels; }
LUNAI_INLINE int64_t lunai_last(const luna_tensor *t) { return t->rank ? t->shape[t->rank - 1] : 1; }
LUNAI_FN int64_t lunai_rows(const luna_tensor *t) { /* of the last axis, which may have no elements */
  int64_t rows = 1;
  int a;
  for (a = 0; a + 1 < t->rank; a++) rows *= t->shape[a];
  return rows;
}
LUNAI_INLINE const luna_tensor *lunai_owner(const luna_tensor *t) { return t && t->base ? t->base : t; }
LUNAI_INLINE float *lunai_grad(const luna_op *op, int i) { return op->in[i] ? op->in[i]->grad : NULL; }
LUNAI_FN void lunai_query_nothing(luna_op *op) { (void)op; }

/* --- shapes: permute, slice, concat, repeat --- */
LUNAI_FN void lunai_permute_run(const luna_op *op, const float *from, float *to, bool back) {
  const luna_tensor *x = op->in[0], *y = op->out[0];
  int64_t stride[4], shape[4], i[4], at = 0;
  int a, pad = 4 - x->rank;
  for (a = 0; a < 4; a++) {
    int64_t s = 1;
    int axis = a < pad ? -1 : (int)op->arg.permute.axes[a - pad], inner;
    for (inner = axis + 1; axis >= 0 && inner < x->rank; inner++) s *= x->shape[inner];
    stride[a] = axis < 0 ? 0 : s;
    shape[a] = a < pad ? 1 : y->shape[a - pad];
  }
  for (i[0] = 0; i[0] < shape[0]; i[0]++)
    for (i[1] = 0; i[1] < shape[1]; i[1]++)
      for (i[2] = 0; i[2] < shape[2]; i[2]++) {
        const int64_t row = i[0] * stride[0] + i[1] * stride[1] + i[2] * stride[2];
        if (stride[3] == 1 && !back) memcpy(to + at, from + row, (size_t)shape[3] * sizeof(float));
        else if (stride[3] == 1) lunai_k(op)->add(shape[3], to + row, from + at, to + row);
        else if (!back) for (i[3] = 0; i[3] < shape[3]; i[3]++) to[at + i[3]] = from[row + i[3] * stride[3]];
        else for (i[3] = 0; i[3] < shape[3]; i[3]++) to[row + i[3] * stride[3]] += from[at + i[3]];
        at += shape[3];
      }
}
LUNAI_FN luna_status lunai_permute_forward(luna_op *op) {
  lunai_permute_run(op, op->in[0]->data, op->out[0]->data, false); return LUNA_OK;
}
LUNAI_FN luna_status lunai_permute_backward(luna_op *op) {
  lunai_permute_run(op, op->out[0]->grad, op->in[0]->grad, true); return LUNA_OK;
}

/* a part of an axis is rows of `width` floats; whole: the tensor with the full axis. arg: axis, start */
LUNAI_FN void lunai_axis_part(const luna_tensor *whole, const luna_tensor *part, int axis, int64_t *rows,
                              int64_t *width, int64_t *stride) {
  int64_t inner = 1;
  int a;
  for (a = axis + 1; a < whole->rank; a++) inner *= whole->shape[a];
  *width = part->shape[axis] * inner;
  *stride = whole->shape[axis] * inner;
  *rows = *stride ? luna_count(whole) / *stride : 0;
}
LUNAI_FN luna_status lunai_slice_forward(luna_op *op) {
  int64_t rows, width, stride, r, start;
  lunai_axis_part(op->in[0], op->out[0], (int)op->arg.slice.axis, &rows, &width, &stride);
  start = op->arg.slice.start * (stride / lunai_max(1, op->in[0]->shape[op->arg.slice.axis]));
  for (r = 0; r < rows; r++)
    memcpy(op->out[0]->data + r * width, op->in[0]->data + r * stride + start, (size_t)width * sizeof(float));
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_slice_backward(luna_op *op) {
  int64_t rows, width, stride, r, start;
  float *dx = op->in[0]->grad;
  lunai_axis_part(op->in[0], op->out[0], (int)op->arg.slice.axis, &rows, &width, &stride);
  start = op->arg.slice.start * (stride / lunai_max(1, op->in[0]->shape[op->arg.slice.axis]));
  for (r = 0; r < rows; r++)
    lunai_k(op)->add(width, dx + r * stride + start, op->out[0]->grad + r * width, dx + r * stride + start);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_concat_run(luna_op *op, bool back) {
  int64_t rows, width, stride, r, start = 0;
  int i;
  for (i = 0; i < op->inputs; i++) {
    lunai_axis_part(op->out[0], op->in[i], (int)op->arg.concat.axis, &rows, &width, &stride);
    for (r = 0; r < rows; r++) {
      float *whole = (back ? op->out[0]->grad : op->out[0]->data) + r * stride + start;
      if (!back) lunai_copy(whole, op->in[i]->data + r * width, (size_t)width * sizeof(float));
      else if (op->in[i]->grad)
        lunai_k(op)->add(width, op->in[i]->grad + r * width, whole, op->in[i]->grad + r * width);
    }
    start += width;
  }
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_concat_forward(luna_op *op) { return lunai_concat_run(op, false); }
LUNAI_FN luna_status lunai_concat_backward(luna_op *op) { return lunai_concat_run(op, true); }

LUNAI_FN luna_status lunai_expand_forward(luna_op *op) {
  const int64_t n = luna_count(op->in[0]);
  int64_t i;
  for (i = 0; i < op->arg.expand.count && n > 0; i++)
    memcpy(op->out[0]->data + i * n, op->in[0]->data, (size_t)n * sizeof(float));
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_expand_backward(luna_op *op) {
  const int64_t n = luna_count(op->in[0]);
  lunai_k(op)->sum_rows(op->arg.expand.count, n, n, 0, n, 1.0f, op->out[0]->grad, op->in[0]->grad);
  return LUNA_OK;
}

/* y [outer, inner] += factor * the sums of x [outer, axis, inner] over the axis */
typedef struct lunai_sum_work {
  const lunai_kernels *kernels;
  int64_t outer, axis, inner;
  float factor;
  const float *x;
  float *y;
} lunai_sum_work;
LUNAI_FN void lunai_sum_task(void *work, int64_t thread, int64_t threads) {
  const lunai_sum_work *w = (const lunai_sum_work *)work;
  const int64_t count = w->inner > 1 ? w->inner : w->outer;
  const int64_t first = lunai_share(count, thread, threads), last = lunai_share(count, thread + 1, threads);
  int64_t o;
  for (o = 0; w->inner > 1 && o < w->outer; o++)
    w->kernels->sum_rows(w->axis, w->inner, w->inner, first, last, w->factor, w->x + o * w->axis * w->inner,
        w->y + o * w->inner);
  for (o = first; w->inner == 1 && o < last; o++)
    w->y[o] += (float)(w->kernels->sum(w->axis, w->x + o * w->axis) * (double)w->factor);
}
LUNAI_FN void lunai_sum_axis(const luna_op *op, int64_t outer, int64_t axis, int64_t inner, float factor,
    const float *x, float *y) {
  lunai_sum_work w;
  w.kernels = lunai_k(op);
  w.outer = outer; w.axis = axis; w.inner = inner;
  w.factor = factor;
  w.x = x;
  w.y = y;
  lunai_run(outer * axis * inner > LUNAI_SPLIT ? &op->ctx->parallel : NULL, lunai_sum_task, &w);
}

/* --- elementwise ops with broadcasting. arg: see luna_op; workspace of backward: lunai_unbroadcast --- */
/* The result's shape, of which the rank is returned, -1 where the inputs do not fit; and the arg's shape and strides,
   which are 0 before */
LUNAI_FN int lunai_broadcast(luna_op *op, int64_t *shape) {
  int64_t count[3] = { 1, 1, 1 }, size[3], stride[3], total = 1;
  int rank = 0, to = LUNA_MAX_RANK, a, k;
  bool joins;
  for (k = 0; k < 3; k++) if (op->in[k] && op->in[k]->rank > rank) rank = op->in[k]->rank;
  for (a = 0; a < LUNA_MAX_RANK; a++) op->arg.elementwise.shape[a] = 1;
  for (a = rank - 1; a >= 0; a--) {
    for (shape[a] = 1, k = 0; k < 3; k++) {
      const int at = op->in[k] ? a - rank + op->in[k]->rank : -1;
      size[k] = at >= 0 ? op->in[k]->shape[at] : 1;
      if (size[k] == 1) continue;
      if (shape[a] != 1 && shape[a] != size[k]) return -1;
      shape[a] = size[k];
    }
    if (total >= 0) total = lunai_checked(total, shape[a]);
    if (shape[a] == 1 || total < 0) continue; /* too large: lunai_finish says so */
    for (joins = to < LUNA_MAX_RANK, k = 0; k < 3; k++) {
      stride[k] = size[k] == 1 ? 0 : count[k];
      count[k] *= size[k];
      if (joins) joins = stride[k] == op->arg.elementwise.stride[k][to] * op->arg.elementwise.shape[to];
    }
    if (!joins) to--;
    op->arg.elementwise.shape[to] *= shape[a];
    for (k = 0; k < 3 && !joins; k++) op->arg.elementwise.stride[k][to] = stride[k];
  }
  return rank;
}
/* elements [first, last) of the result, or (input >= 0) of an input's gradient before it is summed */
LUNAI_FN void lunai_elementwise_part(luna_op *op, int input, int64_t first, int64_t last, float *y, bool add) {
  const int64_t *shape = op->arg.elementwise.shape;
  int64_t step[3], at, n;
  int k;
  for (at = first; at < last; at += n) {
    const int64_t i = at % shape[3], row = at / shape[3];
    const float *x[3];
    n = lunai_min(shape[3] - i, last - at);
    for (k = 0; k < 3; k++) {
      const int64_t *stride = op->arg.elementwise.stride[k];
      const bool there = op->in[k] && (input < 0 || (lunai_op_reads[op->kind] & LUNA_READS_IN(k)));
      step[k] = there ? stride[3] : 0;
      x[k] = there ? op->in[k]->data + row / shape[2] / shape[1] * stride[0] + row / shape[2] % shape[1] * stride[1] +
                     row % shape[2] * stride[2] + i * stride[3] : &op->arg.elementwise.scalar[k];
    }
    if (input >= 0) lunai_k(op)->elementwise_slope((int)op->kind, input, x, step, n, op->out[0]->grad + at, y + at,
        add);
    else if (op->kind == LUNA_OP_ADD && step[0] && step[1]) lunai_k(op)->add(n, x[0], x[1], y + at);
    else if (op->kind == LUNA_OP_MUL && step[0] && step[1]) lunai_k(op)->mul(n, x[0], x[1], y + at);
    else lunai_k(op)->elementwise((int)op->kind, x, step, n, y + at);
  }
}
LUNAI_FN void lunai_elementwise_body(luna_op *op, int64_t first, int64_t last) {
  lunai_elementwise_part(op, -1, first, last, op->out[0]->data, false);
}
LUNAI_FN luna_status lunai_elementwise_forward(luna_op *op) {
  lunai_split(op, luna_count(op->out[0]), 1, lunai_elementwise_body);
  return LUNA_OK;
}
/* Backward of an input that repeats: its gradient for each element of the result, in the workspace (or, where it is
   that of the result but for its sign, there already), then the sums over each axis along which it repeats. */
LUNAI_FN bool lunai_is_repeated(const luna_op *op, int k) { return luna_count(op->in[k]) != luna_count(op->out[0]); }
LUNAI_FN bool lunai_gives_grad(const luna_op *op) { return lunai_op_reads[op->kind] == 0; }
#ifdef LUNA_ONLY_STREAM
#define lunai_elementwise_query lunai_query_nothing
#else
LUNAI_FN void lunai_elementwise_query(luna_op *op) {
  const size_t bytes = (size_t)luna_count(op->out[0]) * sizeof(float);
  int k;
  if (!op->training) return;
  for (k = 0; k < op->inputs; k++)
    if (op->in[k]->needs_grad && lunai_is_repeated(op, k)) op->backward_workspace_size = lunai_gives_grad(op) ? bytes :
        2 * bytes;
}
#endif
LUNAI_FN void lunai_elementwise_back(luna_op *op, int64_t first, int64_t last) {
  const int k = op->arg.elementwise.input;
  const bool repeated = lunai_is_repeated(op, k);
  lunai_elementwise_part(op, k, first, last, repeated ? (float *)op->workspace : op->in[k]->grad, !repeated &&
      !(op->sets >> k & 1));
}
LUNAI_FN void lunai_unbroadcast(luna_op *op, int k) {
  const int64_t *stride = op->arg.elementwise.stride[k];
  const float *from = lunai_gives_grad(op) ? op->out[0]->grad : (float *)op->workspace;
  float factor = op->kind == LUNA_OP_SUB && k == 1 ? -1.0f : 1.0f;
  float *next = (float *)op->workspace + (lunai_gives_grad(op) ? 0 : luna_count(op->out[0]));
  int64_t shape[LUNA_MAX_RANK], outer, inner, left = luna_count(op->out[0]) / luna_count(op->in[k]);
  int a, b;
  memcpy(shape, op->arg.elementwise.shape, sizeof shape);
  for (a = 0; a < LUNA_MAX_RANK; a++) {
    float *to;
    if (stride[a] != 0 || shape[a] == 1) continue;
    for (outer = inner = 1, b = 0; b < LUNA_MAX_RANK; b++) *(b < a ? &outer : &inner) *= b == a ? 1 : shape[b];
    left /= shape[a];
    to = left == 1 ? op->in[k]->grad : next;
    if (left > 1 || (op->sets >> k & 1)) memset(to, 0, (size_t)(outer * inner) * sizeof(float));
    lunai_sum_axis(op, outer, shape[a], inner, factor, from, to);
    shape[a] = 1;
    factor = 1;
    from = to;
    next += outer * inner;
  }
}
LUNAI_FN luna_status lunai_elementwise_backward(luna_op *op) {
  int k;
  for (k = 0; k < op->inputs; k++) {
    const bool repeated = lunai_is_repeated(op, k);
    if (!lunai_grad(op, k) || (k == 0 && op->in[0]->grad == op->out[0]->grad)) continue; /* in place */
    op->arg.elementwise.input = k;
    if (!repeated || !lunai_gives_grad(op)) lunai_split(op, luna_count(op->out[0]), 1, lunai_elementwise_back);
    if (repeated) lunai_unbroadcast(op, k);
  }
  return LUNA_OK;
}

/* --- scale, activation, dropout --- */
LUNAI_FN void lunai_same_body(luna_op *op, int64_t first, int64_t last) {
  const float *x = op->in[0]->data + first;
  float *y = op->out[0]->data + first;
  if (op->kind == LUNA_OP_SCALE) lunai_k(op)->scale(last - first, op->arg.scale.factor, x, y);
  else lunai_k(op)->activate((int)op->activation, last - first, x, y);
}
LUNAI_FN luna_status lunai_same_forward(luna_op *op) {
  lunai_split(op, luna_count(op->out[0]), 1, lunai_same_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_scale_backward(luna_op *op) {
  lunai_k(op)->scale_add(luna_count(op->in[0]), op->arg.scale.factor, op->out[0]->grad, op->in[0]->grad);
  return LUNA_OK;
}
LUNAI_FN void lunai_activation_back(luna_op *op, int64_t first, int64_t last) {
  lunai_k(op)->activate_backward((int)op->activation, last - first, op->in[0]->data + first, op->out[0]->grad + first,
                                 op->in[0]->grad + first);
}
LUNAI_FN luna_status lunai_activation_backward(luna_op *op) {
  lunai_split(op, luna_count(op->in[0]), 1, lunai_activation_back); return LUNA_OK;
}

LUNAI_FN lunai_dropout lunai_op_dropout(const luna_op *op) {
  const luna_step_state *state = op->ctx->state;
  return lunai_dropout_of(op->dropout, state->seed, op->dropout_op, (uint32_t)state->step);
}
LUNAI_FN lunai_dropout lunai_op_last_dropout(const luna_op *op) {
  const luna_step_state *state = op->ctx->state;
  return lunai_dropout_of(op->last_dropout, state->seed, op->last_dropout_op, (uint32_t)state->step);
}
LUNAI_FN void lunai_dropout_body(luna_op *op, int64_t first, int64_t last) {
  const lunai_dropout d = lunai_op_dropout(op);
  lunai_k(op)->dropout(&d, first, last - first, op->in[0]->data + first, op->out[0]->data + first, false);
}
LUNAI_FN void lunai_dropout_back(luna_op *op, int64_t first, int64_t last) {
  const lunai_dropout d = lunai_op_dropout(op);
  lunai_k(op)->dropout(&d, first, last - first, op->out[0]->grad + first, op->in[0]->grad + first, true);
}
LUNAI_FN luna_status lunai_dropout_forward(luna_op *op) {
  lunai_split(op, luna_count(op->in[0]), 1, lunai_dropout_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_dropout_backward(luna_op *op) {
  lunai_split(op, luna_count(op->in[0]), 1, lunai_dropout_back); return LUNA_OK;
}

/* --- reduce --- */
LUNAI_FN luna_status lunai_reduce_forward(luna_op *op) {
  const int64_t outer = op->arg.reduce.outer, inner = op->arg.reduce.inner;
  memset(op->out[0]->data, 0, (size_t)(outer * inner) * sizeof(float));
  lunai_sum_axis(op, outer, op->arg.reduce.axis, inner, op->arg.reduce.factor, op->in[0]->data, op->out[0]->data);
  return LUNA_OK;
}
/* rows [first, last) of outer * axis: each gets its group's gradient */
LUNAI_FN void lunai_reduce_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  const bool set = op->sets & 1;
  const float *dy = op->out[0]->grad;
  float *dx = op->in[0]->grad, same[256];
  int64_t r, i, n;
  for (r = first; inner > 1 && r < last; r++) {
    if (set) lunai_k(op)->scale(inner, op->arg.reduce.factor, dy + r / axis * inner, dx + r * inner);
    else lunai_k(op)->scale_add(inner, op->arg.reduce.factor, dy + r / axis * inner, dx + r * inner);
  }
  for (r = first; inner == 1 && r < last; r += n) {
    n = lunai_min(lunai_min(256, last - r), axis - r % axis);
    for (i = 0; i < n; i++) same[i] = op->arg.reduce.factor * dy[r / axis];
    if (set) memcpy(dx + r, same, (size_t)n * sizeof(float));
    else lunai_k(op)->add(n, dx + r, same, dx + r);
  }
}
LUNAI_FN luna_status lunai_reduce_backward(luna_op *op) {
  lunai_split(op, op->arg.reduce.outer * op->arg.reduce.axis, op->arg.reduce.inner, lunai_reduce_back);
  return LUNA_OK;
}

LUNAI_FN bool lunai_first_max(const float *x, int64_t axis, int64_t stride, int64_t *at) { /* a NaN is the greatest */
  int64_t i;
  for (*at = 0, i = 0; i < axis; i++) {
    if (x[i * stride] > x[*at * stride]) *at = i;
    if (x[i * stride] != x[i * stride]) return *at = i, true;
  }
  return axis > 0;
}
LUNAI_FN luna_status lunai_max_forward(luna_op *op) {
  const int64_t outer = op->arg.reduce.outer, axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  int64_t r, at;
  for (r = 0; r < outer * inner; r++) {
    const float *x = op->in[0]->data + r / inner * axis * inner + r % inner;
    op->out[0]->data[r] = lunai_first_max(x, axis, inner, &at) ? x[at * inner] : 0;
  }
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_max_backward(luna_op *op) {
  const int64_t outer = op->arg.reduce.outer, axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  int64_t r, at;
  for (r = 0; r < outer * inner; r++) {
    const int64_t start = r / inner * axis * inner + r % inner;
    if (lunai_first_max(op->in[0]->data + start, axis, inner, &at))
      op->in[0]->grad[start + at * inner] += op->out[0]->grad[r];
  }
  return LUNA_OK;
}

/* --- cumsum, in double, by panels of columns; its gradient is that of the gradient from the end --- */
#define LUNAI_CUMSUM_COLUMNS 64
LUNAI_FN void lunai_cumsum_panels(luna_op *op, bool back, int64_t first, int64_t last) {
  const int64_t axis = op->arg.reduce.axis, inner = op->arg.reduce.inner;
  const int64_t panels = lunai_divide_up(inner, LUNAI_CUMSUM_COLUMNS);
  const float *x = back ? op->out[0]->grad : op->in[0]->data;
  float *y = back ? op->in[0]->grad : op->out[0]->data;
  int64_t p, r, i;
  for (p = first; p < last; p++) {
    const int64_t start = p % panels * LUNAI_CUMSUM_COLUMNS, n = lunai_min(LUNAI_CUMSUM_COLUMNS, inner - start);
    double sum[LUNAI_CUMSUM_COLUMNS] = { 0 };
    for (r = 0; r < axis; r++) {
      const int64_t at = (p / panels * axis + (back ? axis - 1 - r : r)) * inner + start;
      for (i = 0; i < n; i++) {
        sum[i] += (double)x[at + i];
        y[at + i] = back ? y[at + i] + (float)sum[i] : (float)sum[i];
      }
    }
  }
}
LUNAI_FN void lunai_cumsum_body(luna_op *op, int64_t first, int64_t last) {
  lunai_cumsum_panels(op, false, first, last);
}
LUNAI_FN void lunai_cumsum_back(luna_op *op, int64_t first, int64_t last) {
  lunai_cumsum_panels(op, true, first, last);
}
LUNAI_FN luna_status lunai_cumsum_run(luna_op *op, void (*body)(luna_op *op, int64_t first, int64_t last)) {
  const int64_t panels = lunai_divide_up(op->arg.reduce.inner, LUNAI_CUMSUM_COLUMNS);
  lunai_split(op, op->arg.reduce.outer * panels, op->arg.reduce.axis * lunai_min(op->arg.reduce.inner,
      LUNAI_CUMSUM_COLUMNS), body);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_cumsum_forward(luna_op *op) { return lunai_cumsum_run(op, lunai_cumsum_body); }
LUNAI_FN luna_status lunai_cumsum_backward(luna_op *op) { return lunai_cumsum_run(op, lunai_cumsum_back); }

/* --- mask: rows from lengths[b] on become `fill`, and what they hold is not read --- */
LUNAI_FN bool lunai_mask_row(const luna_op *op, int64_t row) {
  return row % op->in[0]->shape[1] >= op->lengths[row / op->in[0]->shape[1]];
}
LUNAI_FN void lunai_mask_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = op->arg.mask.width;
  int64_t r, i;
  for (r = first; r < last; r++) {
    float *y = op->out[0]->data + r * n;
    if (!lunai_mask_row(op, r)) memcpy(y, op->in[0]->data + r * n, (size_t)n * sizeof(float));
    else for (i = 0; i < n; i++) y[i] = op->arg.mask.fill;
  }
}
LUNAI_FN void lunai_mask_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = op->arg.mask.width;
  int64_t r;
  for (r = first; r < last; r++) {
    float *dx = op->in[0]->grad + r * n;
    if (!lunai_mask_row(op, r)) lunai_k(op)->add(n, dx, op->out[0]->grad + r * n, dx);
  }
}
LUNAI_FN luna_status lunai_mask_forward(luna_op *op) {
  lunai_split(op, op->in[0]->shape[0] * op->in[0]->shape[1], op->arg.mask.width, lunai_mask_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_mask_backward(luna_op *op) {
  lunai_split(op, op->in[0]->shape[0] * op->in[0]->shape[1], op->arg.mask.width, lunai_mask_back); return LUNA_OK;
}

/* --- ratio: all but the last of each row divided by the last; 0 where that is 0 --- */
LUNAI_FN void lunai_ratio_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->out[0]);
  int64_t r;
  for (r = first; r < last; r++) {
    const float *x = op->in[0]->data + r * (n + 1);
    lunai_k(op)->scale(n, x[n] == 0 ? 0 : 1 / x[n], x, op->out[0]->data + r * n);
  }
}
LUNAI_FN void lunai_ratio_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->out[0]);
  int64_t r;
  for (r = first; r < last; r++) {
    const float *x = op->in[0]->data + r * (n + 1), *dy = op->out[0]->grad + r * n;
    const float inverse = x[n] == 0 ? 0 : 1 / x[n];
    float *dx = op->in[0]->grad + r * (n + 1);
    lunai_k(op)->scale_add(n, inverse, dy, dx);
    dx[n] -= inverse * lunai_k(op)->dot(n, dy, op->out[0]->data + r * n);
  }
}
LUNAI_FN luna_status lunai_ratio_forward(luna_op *op) {
  lunai_split(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), lunai_ratio_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_ratio_backward(luna_op *op) {
  lunai_split(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), lunai_ratio_back); return LUNA_OK;
}

/* --- matmul --- */
LUNAI_FN void lunai_matrix(lunai_gemm *g, const float *a, int64_t a_row, int64_t a_column, const float *b,
                           int64_t b_row, int64_t b_column,
                           float *c, int64_t m, int64_t n, int64_t k) {
  lunai_clear(g, sizeof *g);
  g->a = a; g->b = b; g->c = c;
  g->m = m; g->n = n; g->k = k;
  g->a_row = a_row; g->a_column = a_column; g->b_row = b_row; g->b_column = b_column; g->c_row = n;
  g->batch[0] = g->batch[1] = 1;
  g->alpha = 1;
}
LUNAI_FN void lunai_matmul_batch(const luna_op *op, lunai_gemm *g, int64_t a, int64_t b, int64_t c) {
  g->batch[0] = op->arg.matmul.outer;
  g->batch[1] = op->arg.matmul.inner;
  g->a_batch[0] = a * op->arg.matmul.inner; g->a_batch[1] = a;
  g->b_batch[0] = 0; g->b_batch[1] = b;
  g->c_batch[0] = c * op->arg.matmul.inner; g->c_batch[1] = c;
}
/* the three products of a matmul: 0 forward, 1 for a's gradient, 2 for b's (one of `outer`) */
LUNAI_FN void lunai_matmul_product(const luna_op *op, int which, lunai_gemm *g) {
  const int64_t m = op->arg.matmul.m, n = op->arg.matmul.n, k = op->arg.matmul.k;
  const luna_tensor *x = op->in[0], *w = op->in[1], *y = op->out[0];
  const int64_t ar = op->arg.matmul.transpose_a ? 1 : k, ac = op->arg.matmul.transpose_a ? m : 1,
      br = op->arg.matmul.transpose_b ? 1 : n, bc = op->arg.matmul.transpose_b ? k : 1;
  if (which == 0) {
    lunai_matrix(g, x->data, ar, ac, w->data, br, bc, y->data, m, n, k);
    g->dots = op->dots;
    lunai_matmul_batch(op, g, m * k, k * n, m * n);
  } else if (which == 1) {
    /* dA^T = B dC^T */
    if (op->arg.matmul.transpose_a) lunai_matrix(g, w->data, br, bc, y->grad, 1, n, x->grad, k, m, n);
    else lunai_matrix(g, y->grad, n, 1, w->data, bc, br, x->grad, m, k, n);            /* dA = dC B^T */
    lunai_matmul_batch(op, g, m * n, k * n, m * k);
    if (op->arg.matmul.transpose_a) {
      g->a_batch[0] = 0; g->a_batch[1] = k * n;
      g->b_batch[0] = m * n * op->arg.matmul.inner; g->b_batch[1] = m * n;
    }
  } else {
    /* dB^T = dC^T A */
    if (op->arg.matmul.transpose_b) lunai_matrix(g, y->grad, 1, n, x->data, ar, ac, w->grad, n, k, m);
    else lunai_matrix(g, x->data, ac, ar, y->grad, n, 1, w->grad, k, n, m);            /* dB = A^T dC */
    g->batch[1] = op->arg.matmul.inner;
    g->a_batch[1] = op->arg.matmul.transpose_b ? m * n : m * k;
    g->b_batch[1] = op->arg.matmul.transpose_b ? m * k : m * n;
    g->c_batch[1] = k * n;
  }
  if (which) g->accumulate = true;
  /* one b for all: the batch is more rows */
  if (op->arg.matmul.inner == 1 && !op->arg.matmul.transpose_a && op->arg.matmul.outer > 1) {
    if (which < 2) g->m *= op->arg.matmul.outer;
    else g->k *= op->arg.matmul.outer;
    g->batch[0] = 1;
  }
}
LUNAI_FN void lunai_matmul_query(luna_op *op) {
  lunai_gemm g;
  int which;
  for (which = 0; which < (LUNAI_TRAINS && op->training ? 3 : 1); which++) {
    size_t need;
    lunai_matmul_product(op, which, &g);
    need = lunai_k(op)->gemm_scratch(&g, op->ctx->parallel.threads);
    if (which == 0) op->workspace_size = need;
    else if (need > op->backward_workspace_size) op->backward_workspace_size = need;
  }
}
LUNAI_FN luna_status lunai_matmul_forward(luna_op *op) {
  lunai_gemm g;
  lunai_matmul_product(op, 0, &g);
  lunai_k(op)->gemm(&g, &op->ctx->parallel, op->workspace);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_matmul_backward(luna_op *op) {
  lunai_gemm g;
  int64_t o;
  lunai_matmul_product(op, 1, &g);
  if (g.c) lunai_k(op)->gemm(&g, &op->ctx->parallel, op->workspace);
  lunai_matmul_product(op, 2, &g);
  for (o = 0; g.c && o < (op->arg.matmul.inner == 1 && !op->arg.matmul.transpose_a ? 1 : op->arg.matmul.outer); o++) {
    lunai_k(op)->gemm(&g, &op->ctx->parallel, op->workspace);
    g.a += g.a_batch[1] * op->arg.matmul.inner;
    g.b += g.b_batch[1] * op->arg.matmul.inner;
  }
  return LUNA_OK;
}

/* --- linear: in x, weight, bias, residual; y = act(x W^T + b), or drop(x W^T + b) + residual. kept: the pre-activation
   --- */
LUNAI_FN void lunai_linear_product(const luna_op *op, int which, const float *dy, lunai_gemm *g) {
  const luna_tensor *x = op->in[0], *w = op->in[1], *y = op->out[0];
  const int64_t rows = lunai_rows(x), in = lunai_last(x), out = lunai_last(y);
  if (which == 0) {
    lunai_matrix(g, x->data, in, 1, w->data, 1, in, y->data, rows, out, in);
    g->bias = op->in[2] ? op->in[2]->data : NULL;
    g->activation = (int)op->activation;
    g->pre = op->kept_size ? (float *)op->kept : NULL;
    g->residual = op->in[3] && !(op->last_dropout > 0) ? op->in[3]->data : NULL;
    g->dots = op->dots;
  } else if (which == 1) lunai_matrix(g, dy, out, 1, w->data, in, 1, x->grad, rows, in, out);
  else lunai_matrix(g, dy, 1, out, x->data, in, 1, w->grad, out, in, rows);
  g->accumulate = which == 2 || (which == 1 && !(op->sets & 1));
}
/* of a panel of logits: a multiple of the gemm's LUNAI_KC, for x's gradient is a sum over columns */
#define LUNAI_LOGIT_COLUMNS 1024
LUNAI_FN size_t lunai_logits_workspace(luna_op *op, const luna_op *loss, bool backward);
LUNAI_FN luna_status lunai_logits_backward(luna_op *op, const luna_op *loss);
LUNAI_FN bool lunai_drops_last(const luna_op *op) { return LUNAI_TRAINS && op->last_dropout > 0; }
/* whether something comes between the product and y */
LUNAI_FN bool lunai_linear_changes(const luna_op *op) {
  return op->activation != LUNA_ACTIVATION_NONE || lunai_drops_last(op);
}
LUNAI_FN void lunai_linear_query(luna_op *op) {
  lunai_gemm g;
  int which;
  size_t slope = 0; /* of the backward workspace: y's gradient as it leaves the activation or the dropout */
  if (op->dots) return;              /* they need no scratch */
  if (LUNAI_TRAINS && op->loss) {
    op->backward_workspace_size = lunai_logits_workspace(op, op->loss, true);
    return;
  }
  if (lunai_linear_changes(op)) slope = lunai_round((size_t)luna_count(op->out[0]) * sizeof(float));
  if (op->training && op->activation != LUNA_ACTIVATION_NONE) op->kept_size = slope;
  for (which = 0; which < (LUNAI_TRAINS && op->training ? 3 : 1); which++) {
    size_t need;
    lunai_linear_product(op, which, NULL, &g);
    need = lunai_k(op)->gemm_scratch(&g, op->ctx->parallel.threads) + (which ? slope : 0);
    if (which == 0) op->workspace_size = need;
    else if (need > op->backward_workspace_size) op->backward_workspace_size = need;
  }
}
/* y = drop(y) + the residual, the last input */
LUNAI_FN void lunai_drop_and_add(luna_op *op, int64_t first, int64_t last) {
  const lunai_dropout d = lunai_op_last_dropout(op);
  const luna_tensor *residual = op->in[op->inputs - 1];
  float *y = op->out[0]->data + first;
  lunai_k(op)->dropout(&d, first, last - first, y, y, false);
  if (residual) lunai_k(op)->add(last - first, residual->data + first, y, y);
}
LUNAI_FN luna_status lunai_linear_forward(luna_op *op) {
  lunai_gemm g;
  lunai_linear_product(op, 0, NULL, &g);
  lunai_k(op)->gemm(&g, &op->ctx->parallel, op->workspace);
  if (lunai_drops_last(op)) lunai_split(op, luna_count(op->out[0]), 1, lunai_drop_and_add);
  return LUNA_OK;
}
LUNAI_FN void lunai_linear_slope(luna_op *op, int64_t first, int64_t last) {
  const lunai_dropout d = lunai_op_last_dropout(op);
  if (op->last_dropout > 0) {
    lunai_k(op)->dropout(&d, first, last - first, op->out[0]->grad + first, (float *)op->workspace + first, false);
    return;
  }
  lunai_k(op)->activate_slope((int)op->activation, last - first, (const float *)op->kept + first,
                              op->out[0]->grad + first, (float *)op->workspace + first);
}
LUNAI_FN const float *lunai_linear_dy(const luna_op *op) {
  return lunai_linear_changes(op) ? (const float *)op->workspace : op->out[0]->grad;
}
LUNAI_FN void lunai_linear_bias(luna_op *op, int64_t first, int64_t last) {
  const int64_t out = lunai_last(op->out[0]);
  lunai_k(op)->sum_rows(lunai_rows(op->in[0]), out, out, first, last, 1.0f, lunai_linear_dy(op), op->in[2]->grad);
}
/* a residual input's gradient, unless it shares out[0]'s */
LUNAI_FN void lunai_residual_add(luna_op *op, int64_t first, int64_t last) {
  float *to = op->in[op->inputs - 1]->grad + first;
  lunai_k(op)->add(last - first, to, op->out[0]->grad + first, to);
}
LUNAI_FN void lunai_residual_backward(luna_op *op, int at) {
  if (at < op->inputs && lunai_grad(op, at) && op->in[at]->grad != op->out[0]->grad)
    lunai_split(op, luna_count(op->out[0]), 1, lunai_residual_add);
}
LUNAI_FN luna_status lunai_linear_backward(luna_op *op) {
  char *scratch = (char *)op->workspace;
  lunai_gemm g;
  int which;
  if (op->loss) return lunai_logits_backward(op, op->loss);
  if (lunai_linear_changes(op)) {
    lunai_split(op, luna_count(op->out[0]), 1, lunai_linear_slope);
    (void)lunai_take(&scratch, luna_count(op->out[0]));
  }
  for (which = 1; which < 3; which++) {
    lunai_linear_product(op, which, lunai_linear_dy(op), &g);
    if (g.c) lunai_k(op)->gemm(&g, &op->ctx->parallel, scratch);
  }
  if (lunai_grad(op, 2)) lunai_split(op, lunai_last(op->out[0]), lunai_rows(op->in[0]), lunai_linear_bias);
  lunai_residual_backward(op, 3);
  return LUNA_OK;
}

/* --- feed-forward: in x, W1, b1, W2, b2, residual; y = drop2(drop(act(x W1^T + b1)) W2^T + b2) + residual, by
   blocks of rows, so that a block's hidden layer stays in cache; arg: recompute, which keeps nothing of it. kept:
   ReLU's output, or another activation's input --- */
#define LUNAI_FFN_ROWS 392          /* whole tiles of AVX-512, and an even number */
#define LUNAI_FFN_PARTS 8           /* of a block, where it is not multiplied */
typedef struct lunai_ffn_work {
  luna_op *op;
  int64_t first, rows, in, hidden, out;
  /* [rows, hidden]: what the slope is found from; after the activation; after its dropout; gradients of a, then of h */
  float *given, *active, *a, *dh;
  float *dy;                         /* [rows, out]: y's gradient, through its dropout */
  float *sums;                       /* [parts, hidden + out]: columns of dh and dy */
  /* of the weights, made once for all blocks of rows, by the product that reads them */
  float *panels[6];
  void *scratch;
} lunai_ffn_work;
/* 0 and 1: the two products forward, 2 to 5 their gradients */
LUNAI_FN void lunai_ffn_product(const lunai_ffn_work *w, int which, lunai_gemm *g) {
  const luna_op *op = w->op;
  const int64_t n = w->rows, in = w->in, f = w->hidden, out = w->out, x = w->first * in, y = w->first * out;
  switch (which) {
    case 0:                          /* h = x W1^T + b1 */
      lunai_matrix(g, lunai_offset(op->in[0]->data, x), in, 1, op->in[1]->data, 1, in, w->active, n, f, in);
      break;
    case 1:                          /* y = a W2^T + b2 */
      lunai_matrix(g, w->a, f, 1, op->in[3]->data, 1, f, lunai_offset(op->out[0]->data, y), n, out, f);
      break;
    case 2:                          /* dW2 = dy^T a */
      lunai_matrix(g, w->dy, 1, out, w->a, f, 1, op->in[3]->grad, out, f, n);
      break;
    case 3:                          /* da = dy W2 */
      lunai_matrix(g, w->dy, out, 1, op->in[3]->data, f, 1, w->dh, n, f, out);
      break;
    case 4:                          /* dW1 = dh^T x */
      lunai_matrix(g, w->dh, 1, f, lunai_offset(op->in[0]->data, x), in, 1, op->in[1]->grad, f, in, n);
      break;
    default:                         /* dx = dh W1 */
      lunai_matrix(g, w->dh, f, 1, op->in[1]->data, in, 1, lunai_offset(op->in[0]->grad, x), n, in, f);
      break;
  }
  if (which < 2 && op->in[2 + 2 * which]) g->bias = op->in[2 + 2 * which]->data;
  if (which == 0) {
    g->activation = (int)op->activation;
    g->pre = op->activation == LUNA_ACTIVATION_RELU ? NULL : w->given;
  }
  if (which == 1 && op->in[5] && !(op->last_dropout > 0)) g->residual = lunai_offset(op->in[5]->data, y);
  g->accumulate = which == 2 || which == 4 || (which == 5 && !(op->sets & 1));
  g->b_panels = w->panels[which];
}
LUNAI_FN void lunai_ffn_multiply(const lunai_ffn_work *w, int which) {
  lunai_gemm g;
  lunai_ffn_product(w, which, &g);
  if (g.c) lunai_k(w->op)->gemm(&g, &w->op->ctx->parallel, w->scratch);
}
/* Sets the sizes and a block's layout in the workspace; returns its bytes */
LUNAI_FN size_t lunai_ffn_start(lunai_ffn_work *w, luna_op *op, bool backward, void *workspace) {
  char *at = workspace ? (char *)workspace : (char *)w; /* without one only offsets are used */
  char *const start = at;
  const bool keeps = op->kept_size > 0, relu = op->activation == LUNA_ACTIVATION_RELU;
  lunai_gemm g;
  int64_t size;
  int which;
  memset(w, 0, sizeof *w);
  w->op = op;
  w->rows = lunai_min(LUNAI_FFN_ROWS, lunai_rows(op->in[0]));
  w->in = lunai_last(op->in[0]);
  w->hidden = lunai_last(op->in[3]);
  w->out = lunai_last(op->out[0]);
  size = w->rows * w->hidden;
  if (!keeps || !relu) w->active = lunai_take(&at, size);
  if (!keeps && !relu && backward) w->given = lunai_take(&at, size);
  if (op->dropout > 0) w->a = lunai_take(&at, size);
  if (backward) w->dh = lunai_take(&at, size);
  if (backward && op->last_dropout > 0) w->dy = lunai_take(&at, w->rows * w->out);
  if (backward) w->sums = lunai_take(&at, LUNAI_FFN_PARTS * (w->hidden + w->out));
  for (which = 0; which < 6 && w->rows < lunai_rows(op->in[0]); which++) {
    const bool second = which == 1 || which == 3;
    if (which == 2 || which == 4 || (backward ? which == 1 || (which == 0 && keeps) : which > 1)) continue;
    w->panels[which] = (float *)(void *)at;
    at += lunai_k(op)->panels_bytes(which == 0 || which == 3 ? w->hidden : second ? w->out : w->in,
                                    which == 0 ? w->in : which == 3 ? w->out : w->hidden);
    if (!workspace) continue;
    lunai_ffn_product(w, which, &g);
    lunai_k(op)->make_panels(&g, &op->ctx->parallel, w->panels[which]);
  }
  w->scratch = at;
  return (size_t)(at - start);
}
/* to the block from row `first` on; false after the last */
LUNAI_FN bool lunai_ffn_next(lunai_ffn_work *w, int64_t first) {
  const luna_op *op = w->op;
  const bool relu = op->activation == LUNA_ACTIVATION_RELU;
  float *kept = op->kept_size ? (float *)op->kept + first * w->hidden : NULL;
  w->first = first;
  w->rows = lunai_min(LUNAI_FFN_ROWS, lunai_rows(op->in[0]) - first);
  if (kept && relu) w->active = kept;
  if (kept && !relu) w->given = kept;
  if (relu) w->given = w->active;
  if (!(op->dropout > 0)) w->a = w->active;
  if (!(op->last_dropout > 0) && op->out[0]->grad) w->dy = op->out[0]->grad + first * w->out;
  return w->rows > 0;
}
LUNAI_FN void lunai_feed_forward_query(luna_op *op) {
  lunai_ffn_work w;
  size_t gemm = 0;
  lunai_gemm g;
  int which;
  op->kept_size = 0;
  if (op->training && !op->arg.feed_forward.recompute)
    op->kept_size = (size_t)(lunai_rows(op->in[0]) * lunai_last(op->in[3])) * sizeof(float);
  op->workspace_size = lunai_ffn_start(&w, op, false, NULL);
  op->backward_workspace_size = lunai_ffn_start(&w, op, true, NULL);
  for (which = 0; which < 6; which++) {
    size_t need;
    lunai_ffn_product(&w, which, &g);
    need = lunai_k(op)->gemm_scratch(&g, op->ctx->parallel.threads);
    if (need > gemm) gemm = need;
  }
  op->workspace_size += gemm;
  op->backward_workspace_size += gemm;
}
/* a thread's share of a block's elementwise work: n elements from `first` on */
LUNAI_FN void lunai_ffn_part(const lunai_ffn_work *w, int64_t width, int64_t thread, int64_t threads, int64_t *first,
                             int64_t *n) {
  *first = lunai_share(w->rows, thread, threads) * width;
  *n = lunai_share(w->rows, thread + 1, threads) * width - *first;
}
LUNAI_FN void lunai_ffn_drop(void *work, int64_t thread, int64_t threads) {
  const lunai_ffn_work *w = (const lunai_ffn_work *)work;
  const lunai_dropout d = lunai_op_dropout(w->op);
  int64_t at, n;
  lunai_ffn_part(w, w->hidden, thread, threads, &at, &n);
  lunai_k(w->op)->dropout(&d, w->first * w->hidden + at, n, w->active + at, w->a + at, false);
}
LUNAI_FN void lunai_ffn_result(void *work, int64_t thread, int64_t threads) {
  const lunai_ffn_work *w = (const lunai_ffn_work *)work;
  int64_t at, n;
  lunai_ffn_part(w, w->out, thread, threads, &at, &n);
  at += w->first * w->out;
  lunai_drop_and_add(w->op, at, at + n);
}
LUNAI_FN luna_status lunai_feed_forward_forward(luna_op *op) {
  const lunai_parallel *parallel = &op->ctx->parallel;
  lunai_ffn_work w;
  int64_t first;
  lunai_ffn_start(&w, op, false, op->workspace);
  for (first = 0; lunai_ffn_next(&w, first); first += LUNAI_FFN_ROWS) {
    lunai_ffn_multiply(&w, 0);
    if (op->dropout > 0) lunai_run(parallel, lunai_ffn_drop, &w);
    lunai_ffn_multiply(&w, 1);
    if (op->last_dropout > 0) lunai_run(parallel, lunai_ffn_result, &w);
  }
  return LUNA_OK;
}
#ifndef LUNA_NO_TRAIN
/* before the products of the gradients: a and dy */
LUNAI_FN void lunai_ffn_before(void *work, int64_t thread, int64_t threads) {
  const lunai_ffn_work *w = (const lunai_ffn_work *)work;
  const luna_op *op = w->op;
  const lunai_dropout d = lunai_op_last_dropout(op);
  int64_t at, n;
  lunai_ffn_part(w, w->hidden, thread, threads, &at, &n);
  if (op->kept_size && w->given != w->active)
    lunai_k(op)->activate((int)op->activation, n, w->given + at, w->active + at);
  if (op->dropout > 0) lunai_ffn_drop(work, thread, threads);
  if (!(op->last_dropout > 0)) return;
  lunai_ffn_part(w, w->out, thread, threads, &at, &n);
  lunai_k(op)->dropout(&d, w->first * w->out + at, n, op->out[0]->grad + w->first * w->out + at, w->dy + at, false);
}
/* from the gradient of a to that of h, by parts of the block; each leaves its sums of columns in w->sums, for the
   biases */
LUNAI_FN void lunai_ffn_slope(void *work, int64_t thread, int64_t threads) {
  const lunai_ffn_work *w = (const lunai_ffn_work *)work;
  const luna_op *op = w->op;
  const int64_t f = w->hidden, out = w->out;
  const lunai_dropout d = lunai_op_dropout(op);
  int64_t part = lunai_share(LUNAI_FFN_PARTS, thread, threads);
  for (; part < lunai_share(LUNAI_FFN_PARTS, thread + 1, threads); part++) {
    float *sums = w->sums + part * (f + out), *dh;
    int64_t row, rows, at, n;
    lunai_ffn_part(w, 1, part, LUNAI_FFN_PARTS, &row, &rows);
    at = row * f;
    n = rows * f;
    dh = w->dh + at;
    if (op->dropout > 0) lunai_k(op)->dropout(&d, w->first * f + at, n, dh, dh, false);
    lunai_k(op)->activate_slope((int)op->activation, n, w->given + at, dh, dh);
    memset(sums, 0, (size_t)(f + out) * sizeof(float));
    if (lunai_grad(op, 2)) lunai_k(op)->sum_rows(rows, f, f, 0, f, 1.0f, dh, sums);
    if (lunai_grad(op, 4)) lunai_k(op)->sum_rows(rows, out, out, 0, out, 1.0f, w->dy + row * out, sums + f);
  }
}
/* x's gradient may be made in place of y's: it is written last, and where nothing more of y's is read */
LUNAI_FN luna_status lunai_feed_forward_backward(luna_op *op) {
  const lunai_parallel *parallel = &op->ctx->parallel;
  lunai_ffn_work w;
  int64_t first;
  int which;
  lunai_ffn_start(&w, op, true, op->workspace);
  lunai_residual_backward(op, 5);
  for (first = 0; lunai_ffn_next(&w, first); first += LUNAI_FFN_ROWS) {
    if (!op->kept_size) lunai_ffn_multiply(&w, 0);
    if (op->dropout > 0 || op->last_dropout > 0 || (op->kept_size && op->activation != LUNA_ACTIVATION_RELU))
      lunai_run(parallel, lunai_ffn_before, &w);
    for (which = 2; which < 4; which++) lunai_ffn_multiply(&w, which);
    lunai_run(parallel, lunai_ffn_slope, &w);
    if (lunai_grad(op, 2))
      lunai_k(op)->sum_rows(LUNAI_FFN_PARTS, w.hidden, w.hidden + w.out, 0, w.hidden, 1.0f, w.sums, op->in[2]->grad);
    if (lunai_grad(op, 4))
      lunai_k(op)->sum_rows(LUNAI_FFN_PARTS, w.out, w.hidden + w.out, 0, w.out, 1.0f, w.sums + w.hidden,
                            op->in[4]->grad);
    for (which = 4; which < 6; which++) lunai_ffn_multiply(&w, which);
  }
  return LUNA_OK;
}
#endif

/* --- softmax over the last axis; lengths mask it by axis 0 --- */
LUNAI_FN int64_t lunai_softmax_width(const luna_op *op, int64_t row) {
  return op->lengths ?
      lunai_min(lunai_last(op->in[0]), op->lengths[row / (lunai_rows(op->in[0]) / op->in[0]->shape[0])]) :
          lunai_last(op->in[0]);
}
LUNAI_FN void lunai_softmax_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]);
  int64_t r;
  for (r = first; r < last; r++) {
    const int64_t width = lunai_softmax_width(op, r);
    lunai_k(op)->softmax(1, width, op->in[0]->data + r * n, op->out[0]->data + r * n);
    memset(op->out[0]->data + r * n + width, 0, (size_t)(n - width) * sizeof(float));
  }
}
LUNAI_FN void lunai_softmax_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]);
  int64_t r;
  for (r = first; r < last; r++)
    lunai_k(op)->softmax_backward(1, lunai_softmax_width(op, r), op->out[0]->data + r * n, op->out[0]->grad + r * n,
                                  op->in[0]->grad + r * n);
}
LUNAI_FN luna_status lunai_softmax_forward(luna_op *op) {
  lunai_split(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), lunai_softmax_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_softmax_backward(luna_op *op) {
  lunai_split(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), lunai_softmax_back); return LUNA_OK;
}

/* --- layer norm: in x, weight, bias; kept: mean and 1/deviation of each row. Backward goes by blocks of rows: a
   block's sums of columns are made while it is in cache, and go to the workspace [blocks, 2, n] --- */
#define LUNAI_NORM_ROWS 64
LUNAI_FN void lunai_layer_norm_query(luna_op *op) {
  if (op->training) op->kept_size = (size_t)lunai_rows(op->in[0]) * 2 * sizeof(float);
  op->backward_workspace_size = (size_t)(lunai_divide_up(lunai_rows(op->in[0]), LUNAI_NORM_ROWS) * 2 *
                                         lunai_last(op->in[0])) * sizeof(float);
}
LUNAI_FN const float *lunai_data(const luna_op *op, int i) { return op->in[i] ? op->in[i]->data : NULL; }
LUNAI_FN void lunai_layer_norm_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]), rows = lunai_rows(op->in[0]);
  float *kept = (float *)op->kept, *mean = kept ? kept + first : NULL, *rstd = kept ? kept + rows + first : NULL;
  if (op->arg.norm.rms)
    lunai_k(op)->rms_norm(last - first, n, op->in[0]->data + first * n, lunai_data(op, 1), LUNAI_NORM_EPSILON,
        op->out[0]->data + first * n, mean, rstd);
  else lunai_k(op)->layer_norm(last - first, n, op->in[0]->data + first * n, lunai_data(op, 1), lunai_data(op, 2),
      LUNAI_NORM_EPSILON,
                          op->out[0]->data + first * n, mean, rstd);
}
LUNAI_FN void lunai_layer_norm_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]), rows = lunai_rows(op->in[0]);
  const float *kept = (const float *)op->kept;
  for (; first < last; first++) {
    const int64_t row = first * LUNAI_NORM_ROWS, count = lunai_min(LUNAI_NORM_ROWS, rows - row);
    const float *x = op->in[0]->data + row * n, *dy = op->out[0]->grad + row * n;
    float *sums = (float *)op->workspace + first * 2 * n;
    if (lunai_grad(op, 1) || lunai_grad(op, 2)) {
      memset(sums, 0, (size_t)(2 * n) * sizeof(float));
      lunai_k(op)->layer_norm_weights(count, n, 0, n, x, kept + row, kept + rows + row, dy,
                                      lunai_grad(op, 1) ? sums : NULL, lunai_grad(op, 2) ? sums + n : NULL);
    }
    if (op->in[0]->grad) lunai_k(op)->layer_norm_backward(op->arg.norm.rms, count, n, x, lunai_data(op, 1), kept + row,
        kept + rows + row, dy, op->in[0]->grad + row * n, !(op->sets & 1));
  }
}
LUNAI_FN void lunai_layer_norm_columns(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]), blocks = lunai_divide_up(lunai_rows(op->in[0]), LUNAI_NORM_ROWS);
  const float *sums = (const float *)op->workspace;
  int i;
  for (i = 0; i < 2; i++)
    if (lunai_grad(op, 1 + i))
      lunai_k(op)->sum_rows(blocks, n, 2 * n, first, last, 1.0f, sums + i * n, lunai_grad(op, 1 + i));
}
LUNAI_FN luna_status lunai_layer_norm_forward(luna_op *op) {
  lunai_split(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), lunai_layer_norm_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_layer_norm_backward(luna_op *op) {
  const int64_t n = lunai_last(op->in[0]), blocks = lunai_divide_up(lunai_rows(op->in[0]), LUNAI_NORM_ROWS);
  lunai_split(op, blocks, LUNAI_NORM_ROWS * n, lunai_layer_norm_back);
  if (lunai_grad(op, 1) || lunai_grad(op, 2)) lunai_split(op, n, blocks, lunai_layer_norm_columns);
  return LUNA_OK;
}

/* --- embedding: in table; index: tokens. Each thread owns columns, so that the sums keep the tokens' order --- */
/* columns [first, last) of rows [count, d] are added to the table's rows index[i] */
LUNAI_FN void lunai_scatter_rows(const luna_op *op, int64_t count, int64_t d, int64_t first, int64_t last,
    const float *rows, float *table) {
  int64_t i;
  for (i = 0; i < count; i++) {
    float *row = table + op->index[i] * d + first;
    lunai_k(op)->add(last - first, row, rows + i * d + first, row);
  }
}
LUNAI_FN void lunai_embedding_body(luna_op *op, int64_t first, int64_t last) {
  const int64_t d = lunai_last(op->in[0]);
  int64_t i;
  for (i = first; i < last; i++)
    memcpy(op->out[0]->data + i * d, op->in[0]->data + op->index[i] * d, (size_t)d * sizeof(float));
}
LUNAI_FN void lunai_embedding_back(luna_op *op, int64_t first, int64_t last) {
  lunai_scatter_rows(op, lunai_rows(op->out[0]), lunai_last(op->in[0]), first, last, op->out[0]->grad, op->in[0]->grad);
}
LUNAI_FN luna_status lunai_embedding_forward(luna_op *op) {
  lunai_split(op, lunai_rows(op->out[0]), lunai_last(op->in[0]), lunai_embedding_body); return LUNA_OK;
}
LUNAI_FN luna_status lunai_embedding_backward(luna_op *op) {
  lunai_split(op, lunai_last(op->in[0]), lunai_rows(op->out[0]), lunai_embedding_back); return LUNA_OK;
}

/* --- scatter-add: in x [n, d], rows [count, d]; index [count] --- */
LUNAI_FN void lunai_scatter_body(luna_op *op, int64_t first, int64_t last) {
  lunai_scatter_rows(op, op->in[1]->shape[0], op->in[1]->shape[1], first, last, op->in[1]->data, op->out[0]->data);
}
LUNAI_FN void lunai_scatter_back(luna_op *op, int64_t first, int64_t last) { /* of rows */
  const int64_t d = op->in[1]->shape[1];
  int64_t i;
  for (i = first; i < last; i++)
    lunai_k(op)->add(d, op->in[1]->grad + i * d, op->out[0]->grad + op->index[i] * d, op->in[1]->grad + i * d);
}
LUNAI_FN void lunai_scatter_through(luna_op *op, int64_t first, int64_t last) {
  lunai_k(op)->add(last - first, op->in[0]->grad + first, op->out[0]->grad + first, op->in[0]->grad + first);
}
LUNAI_FN luna_status lunai_scatter_add_forward(luna_op *op) {
  memcpy(op->out[0]->data, op->in[0]->data, (size_t)luna_count(op->in[0]) * sizeof(float));
  lunai_split(op, op->in[1]->shape[1], op->in[1]->shape[0], lunai_scatter_body);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_scatter_add_backward(luna_op *op) {
  if (op->in[1]->grad) lunai_split(op, op->in[1]->shape[0], op->in[1]->shape[1], lunai_scatter_back);
  if (op->in[0]->grad && op->in[0]->grad != op->out[0]->grad) lunai_split(op, luna_count(op->in[0]), 1,
      lunai_scatter_through);
  return LUNA_OK;
}

/* --- sinusoidal positions, of no inputs: [n, d] from arg.sinusoids.first on. By blocks of rows: an angle is the sum of
   its block's and its place's in the block; workspace: sine and cosine of the places' [min(n, block), d/2, 2] --- */
#define LUNAI_ANGLES 64
LUNAI_FN int64_t lunai_angle_rows(const luna_op *op) { return lunai_min(op->out[0]->shape[0], LUNAI_ANGLES); }
LUNAI_FN void lunai_sinusoids_query(luna_op *op) {
  op->workspace_size = (size_t)(lunai_angle_rows(op) * (lunai_last(op->out[0]) / 2)) * 2 * sizeof(double);
}
LUNAI_FN void lunai_sinusoids_places(luna_op *op, int64_t first, int64_t last) {
  const int64_t half = lunai_last(op->out[0]) / 2;
  double *table = (double *)op->workspace;
  int64_t t, i;
  for (t = first; t < last; t++)
    for (i = 0; i < half; i++)
      lunai_sine((double)t * lunai_frequency(i, half), &table[(t * half + i) * 2], &table[(t * half + i) * 2 + 1]);
}
LUNAI_FN void lunai_sinusoids_block(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = op->out[0]->shape[0], d = lunai_last(op->out[0]), half = d / 2;
  int64_t t, i, j;
  for (t = first * LUNAI_ANGLES; first < last; first++, t += LUNAI_ANGLES) {
    const int64_t rows = lunai_min(LUNAI_ANGLES, n - t);
    float *row = op->out[0]->data + t * d;
    for (i = 0; i < half; i++) {
      double s, c;
      lunai_sine((double)(op->arg.sinusoids.first + t) * lunai_frequency(i, half), &s, &c);
      for (j = 0; j < rows; j++) {
        const double *angle = (const double *)op->workspace + (j * half + i) * 2;
        row[j * d + i] = (float)(s * angle[1] + c * angle[0]);
        row[j * d + half + i] = (float)(c * angle[1] - s * angle[0]);
      }
    }
    for (j = 0; j < rows && d % 2; j++) row[j * d + d - 1] = 0;
  }
}
LUNAI_FN luna_status lunai_sinusoids_forward(luna_op *op) {
  const int64_t n = op->out[0]->shape[0], d = lunai_last(op->out[0]);
  lunai_split(op, lunai_angle_rows(op), d, lunai_sinusoids_places);
  lunai_split(op, lunai_divide_up(n, LUNAI_ANGLES), LUNAI_ANGLES * d, lunai_sinusoids_block);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_sinusoids_backward(luna_op *op) { (void)op; return LUNA_OK; } /* no gradient: never called */

/* --- cross-entropy: in logits; index: labels (-1: ignored). kept: log-sum-exp of each row --- */
/* of logits [rows, classes], by the op that has the labels */
LUNAI_FN lunai_cross_entropy lunai_cross_entropy_of(const luna_op *op, int64_t rows, int64_t classes,
                                                    const float *logits) {
  lunai_cross_entropy a;
  memset(&a, 0, sizeof a);
  a.logits = logits;
  a.labels = op->index;
  a.rows = rows;
  a.classes = a.columns = a.logits_row = a.grad_row = classes;
  a.smoothing = op->arg.cross_entropy.smoothing;
  a.lse = (float *)op->kept;
  return a;
}
LUNAI_FN float lunai_cross_entropy_factor(const luna_op *op) {
  return op->arg.cross_entropy.factor * op->out[0]->grad[0];
}
LUNAI_FN lunai_cross_entropy lunai_cross_entropy_args(const luna_op *op) {
  return lunai_cross_entropy_of(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), op->in[0]->data);
}
LUNAI_FN void lunai_cross_entropy_query(luna_op *op) {
  const size_t rows = (size_t)lunai_rows(op->in[0]) * sizeof(float);
  if (op->training) op->kept_size = rows;
  op->workspace_size = rows;
}
LUNAI_FN void lunai_cross_entropy_body(luna_op *op, int64_t first, int64_t last) {
  lunai_cross_entropy a = lunai_cross_entropy_args(op);
  a.loss = (float *)op->workspace;
  a = lunai_cross_entropy_rows(&a, first, last);
  lunai_k(op)->cross_entropy(&a);
}
LUNAI_FN void lunai_cross_entropy_back(luna_op *op, int64_t first, int64_t last) {
  lunai_cross_entropy a = lunai_cross_entropy_args(op);
  a.grad = op->in[0]->grad;
  a.factor = lunai_cross_entropy_factor(op);
  a.add = !(op->sets & 1);
  a = lunai_cross_entropy_rows(&a, first, last);
  lunai_k(op)->cross_entropy_backward(&a);
}
LUNAI_FN luna_status lunai_cross_entropy_forward(luna_op *op) {
  const int64_t rows = lunai_rows(op->in[0]);
  lunai_split(op, rows, lunai_last(op->in[0]), lunai_cross_entropy_body);
  op->out[0]->data[0] = (float)(lunai_k(op)->sum(rows, (const float *)op->workspace) *
                                (double)op->arg.cross_entropy.factor);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_cross_entropy_backward(luna_op *op) {
  lunai_split(op, lunai_rows(op->in[0]), lunai_last(op->in[0]), lunai_cross_entropy_back);
  return LUNA_OK;
}

/* --- the cross-entropy of logits = x W^T + b by panels of columns: forward (LINEAR_CROSS_ENTROPY) with sums from panel
   to panel and no logits kept, and backward, where also LINEAR makes the gradient of logits that a cross-entropy alone
   reads, to the bits of the whole products. --- */
typedef struct lunai_logits {
  luna_op *op;                       /* with x, W and b */
  lunai_cross_entropy part;          /* of the panel */
  float *panel;                      /* [rows, part.columns] in rows of part.grad_row: logits, then their gradient */
  float *panels;                     /* x, as the products for W's gradient read it */
  void *scratch;
} lunai_logits;
/* a panel's products: 0 logits, 1 for x's gradient, 2 for W's */
LUNAI_FN void lunai_logits_product(const lunai_logits *w, int which, lunai_gemm *g) {
  const luna_tensor *x = w->op->in[0], *weight = w->op->in[1], *bias = w->op->in[2];
  const int64_t rows = w->part.rows, in = lunai_last(x), columns = w->part.columns, first = w->part.first,
      stride = w->part.grad_row;
  if (which == 0) {
    lunai_matrix(g, x->data, in, 1, lunai_offset(weight->data, first * in), 1, in, w->panel, rows, columns, in);
    g->c_row = stride;
    g->bias = bias ? lunai_offset(bias->data, first) : NULL;
  } else if (which == 1) lunai_matrix(g, w->panel, stride, 1, lunai_offset(weight->data, first * in), in, 1, x->grad,
                                      rows, in, columns);
  else {
    lunai_matrix(g, w->panel, 1, stride, x->data, in, 1, lunai_offset(weight->grad, first * in), columns, in, rows);
    g->b_panels = w->panels;
  }
  g->accumulate = which == 2 || (which == 1 && (first > 0 || !(w->op->sets & 1)));
}
LUNAI_FN void lunai_logits_multiply(const lunai_logits *w, int which) {
  lunai_gemm g;
  lunai_logits_product(w, which, &g);
  if (g.c) lunai_k(w->op)->gemm(&g, &w->op->ctx->parallel, w->scratch);
}
/* to the panel from column `first` on; false after the last */
LUNAI_FN bool lunai_logits_next(lunai_logits *w, int64_t first) {
  w->part.first = first;
  w->part.columns = lunai_min(LUNAI_LOGIT_COLUMNS, w->part.classes - first);
  return w->part.columns > 0;
}
/* The sizes, and where the parts lie in the workspace; the bytes of them without the products' scratch */
LUNAI_FN size_t lunai_logits_start(lunai_logits *w, luna_op *op, const luna_op *loss, bool backward, void *workspace) {
  char *at = workspace ? (char *)workspace : (char *)w, *const start = at; /* without one only distances count */
  const int64_t rows = lunai_rows(op->in[0]);
  lunai_gemm g;
  memset(w, 0, sizeof *w);
  w->op = op;
  w->part = lunai_cross_entropy_of(loss, rows, op->in[1]->shape[0], NULL);
  /* no power of two, or rows would share cache sets */
  w->part.grad_row = w->part.logits_row = LUNAI_LOGIT_COLUMNS + 16;
  lunai_logits_next(w, 0);
  w->panel = lunai_take(&at, rows * w->part.grad_row);
  w->part.logits = w->part.grad = w->panel;
  if (backward) {
    w->panels = (float *)(void *)at;
    at += lunai_k(op)->panels_bytes(lunai_last(op->in[0]), rows);
    lunai_logits_product(w, 2, &g);
    if (workspace && g.c) lunai_k(op)->make_panels(&g, &op->ctx->parallel, w->panels);
  } else {
    w->part.sums = (lunai_row_sums *)(void *)at;
    at += lunai_round((size_t)rows * sizeof *w->part.sums);
    w->part.loss = lunai_take(&at, rows);
  }
  w->scratch = at;
  return (size_t)(at - start);
}
LUNAI_FN size_t lunai_logits_workspace(luna_op *op, const luna_op *loss, bool backward) {
  lunai_logits w;
  size_t bytes = lunai_logits_start(&w, op, loss, backward, NULL), gemm = 0;
  int which;
  for (which = 0; which < (backward ? 3 : 1); which++) {
    lunai_gemm g;
    size_t need;
    lunai_logits_product(&w, which, &g);
    need = lunai_k(op)->gemm_scratch(&g, op->ctx->parallel.threads);
    if (need > gemm) gemm = need;
  }
  return bytes + gemm;
}
LUNAI_FN lunai_cross_entropy lunai_logits_rows(const lunai_logits *w, int64_t thread, int64_t threads) {
  return lunai_cross_entropy_rows(&w->part, lunai_share(w->part.rows, thread, threads),
                                  lunai_share(w->part.rows, thread + 1, threads));
}
LUNAI_FN void lunai_logits_sums(void *work, int64_t thread, int64_t threads) {
  const lunai_logits *w = (const lunai_logits *)work;
  const lunai_cross_entropy a = lunai_logits_rows(w, thread, threads);
  lunai_k(w->op)->cross_entropy(&a);
}
LUNAI_FN void lunai_logits_gradient(void *work, int64_t thread, int64_t threads) {
  const lunai_logits *w = (const lunai_logits *)work;
  const lunai_cross_entropy a = lunai_logits_rows(w, thread, threads);
  lunai_k(w->op)->cross_entropy_backward(&a);
}
LUNAI_FN void lunai_logits_bias(void *work, int64_t thread, int64_t threads) {
  const lunai_logits *w = (const lunai_logits *)work;
  const int64_t n = w->part.columns;
  lunai_k(w->op)->sum_rows(w->part.rows, n, w->part.grad_row, lunai_share(n, thread, threads),
                           lunai_share(n, thread + 1, threads), 1.0f, w->panel,
                           w->op->in[2]->grad + w->part.first);
}
LUNAI_FN luna_status lunai_logits_backward(luna_op *op, const luna_op *loss) {
  const lunai_parallel *parallel = &op->ctx->parallel;
  const float *logits = loss == op ? NULL : loss->in[0]->data;
  lunai_logits w;
  int64_t first;
  lunai_logits_start(&w, op, loss, true, op->workspace);
  w.part.factor = lunai_cross_entropy_factor(loss);
  if (logits) w.part.logits_row = w.part.classes;
  for (first = 0; lunai_logits_next(&w, first); first += LUNAI_LOGIT_COLUMNS) {
    if (logits) w.part.logits = logits + first;
    else lunai_logits_multiply(&w, 0);
    lunai_run(parallel, lunai_logits_gradient, &w);
    lunai_logits_multiply(&w, 1);
    lunai_logits_multiply(&w, 2);
    if (lunai_grad(op, 2)) lunai_run(parallel, lunai_logits_bias, &w);
  }
  return LUNA_OK;
}
/* in x, W, b; index, arguments and kept as of cross-entropy */
LUNAI_FN void lunai_linear_cross_entropy_query(luna_op *op) {
  if (op->training) op->kept_size = (size_t)lunai_rows(op->in[0]) * sizeof(float);
  op->workspace_size = lunai_logits_workspace(op, op, false);
  op->backward_workspace_size = lunai_logits_workspace(op, op, true);
}
LUNAI_FN luna_status lunai_linear_cross_entropy_forward(luna_op *op) {
  lunai_logits w;
  int64_t first;
  lunai_logits_start(&w, op, op, false, op->workspace);
  for (first = 0; lunai_logits_next(&w, first); first += LUNAI_LOGIT_COLUMNS) {
    lunai_logits_multiply(&w, 0);
    lunai_run(&op->ctx->parallel, lunai_logits_sums, &w);
  }
  op->out[0]->data[0] = (float)(lunai_k(op)->sum(w.part.rows, w.part.loss) * (double)op->arg.cross_entropy.factor);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_linear_cross_entropy_backward(luna_op *op) { return lunai_logits_backward(op, op); }

/* An op that is one kernel with an argument struct: query, forward and backward from lunai_<name>_args. kept_floats:
   for backward */
#define LUNAI_KERNEL_OP(name, kept_floats) \
  LUNAI_FN void lunai_##name##_query(luna_op *op) { \
    lunai_##name a; \
    if (op->training) op->kept_size = (size_t)(kept_floats) * sizeof(float); \
    lunai_##name##_args(op, &a); \
    op->workspace_size = lunai_k(op)->name##_scratch(&a, op->ctx->parallel.threads, false); \
    op->backward_workspace_size = lunai_k(op)->name##_scratch(&a, op->ctx->parallel.threads, true); \
  } \
  LUNAI_FN luna_status lunai_##name##_forward(luna_op *op) { \
    lunai_##name a; \
    lunai_##name##_args(op, &a); \
    lunai_k(op)->name(&a, &op->ctx->parallel, op->workspace); \
    return LUNA_OK; \
  } \
  LUNAI_FN luna_status lunai_##name##_backward(luna_op *op) { \
    lunai_##name a; \
    lunai_##name##_args(op, &a); \
    lunai_k(op)->name##_backward(&a, &op->ctx->parallel, op->workspace); \
    return LUNA_OK; \
  }

/* --- softmax attention: in q, k, v; out y, sums or null; arg: heads, batch, queries, keys, scale, causal. kept:
   log-sum-exp, of sparse attention the second output or null. pack is the same with in weights, context; one head,
   scale 1, keys = values --- */
LUNAI_FN void lunai_attention_args(const luna_op *op, lunai_attention *a) {
  const bool pack = op->kind == LUNA_OP_PACK, ragged = op->query_offsets != NULL;
  const luna_tensor *q = op->in[0], *k = op->in[1], *v = op->in[pack ? 1 : 2];
  memset(a, 0, sizeof *a);
  a->q = q->data; a->k = k->data; a->v = v->data; a->out = op->out[0]->data;
  a->lse = (float *)op->kept;
  a->sums = op->out[1] ? op->out[1]->data : NULL;
  a->heads = op->arg.attention.heads; a->batch = op->arg.attention.batch; a->queries = op->arg.attention.queries;
  a->keys = op->arg.attention.keys;
  a->q_row = lunai_last(q); a->k_row = lunai_last(k); a->v_row = lunai_last(v);
  a->q_head = a->k_head = a->head_dim = a->q_row / a->heads;
  a->v_head = a->out_head = a->value_dim = a->v_row / a->heads;
  a->out_row = a->v_row;
  a->q_batch = ragged || q->shape[0] != a->batch ? 0 : a->queries * a->q_row;
  a->k_batch = ragged || k->shape[0] != a->batch ? 0 : a->keys * a->k_row;
  a->v_batch = ragged || v->shape[0] != a->batch ? 0 : a->keys * a->v_row;
  a->out_batch = ragged ? 0 : a->queries * a->out_row;
  a->lengths = op->lengths; a->query_offsets = op->query_offsets; a->key_offsets = op->key_offsets;
  a->scale = op->arg.attention.scale;
  a->causal = op->arg.attention.causal;
  a->dropout = lunai_op_dropout(op);
  a->grad_out = op->out[0]->grad;
  a->grad_sums = op->out[1] ? op->out[1]->grad : NULL;
  a->grad_q = q->grad; a->grad_k = k->grad; a->grad_v = v->grad;
  a->patterns = op->arg.attention.patterns;
  a->pattern_count = op->arg.attention.pattern_count;
  if (op->kind != LUNA_OP_SPARSE_ATTENTION || !op->out[1]) return;
  a->lse = op->out[1]->data;
  a->sums = NULL;
  /* sizes are asked before that gradient is there */
  a->grad_lse = op->out[1]->grad ? op->out[1]->grad : (const float *)(const void *)op;
  a->grad_sums = NULL;
}
LUNAI_KERNEL_OP(attention, lunai_rows(op->out[0]) * op->arg.attention.heads)

/* --- unpack: in x, k, bias, v, out_bias, residual. kept: log-sum-exp of each row and head --- */
LUNAI_FN void lunai_unpack_args(const luna_op *op, lunai_unpack *u) {
  const luna_tensor *x = op->in[0], *k = op->in[1];
  memset(u, 0, sizeof *u);
  u->x = x->data; u->k = k->data; u->bias = op->in[2]->data; u->v = op->in[3]->data; u->out_bias = lunai_data(op, 4);
  u->residual = lunai_data(op, 5);
  u->out = op->out[0]->data;
  u->lse = (float *)op->kept;
  u->batch = x->shape[0]; u->rows = x->shape[1]; u->dim = x->shape[2]; u->heads = k->shape[1]; u->slots = k->shape[2];
  u->lengths = op->lengths;
  u->dropout = lunai_op_dropout(op);
  u->last = lunai_op_last_dropout(op);
  u->grad_out = op->out[0]->grad;
  u->grad_x = x->grad; u->grad_k = k->grad; u->grad_bias = op->in[2]->grad; u->grad_v = op->in[3]->grad;
  u->grad_out_bias = lunai_grad(op, 4);
}
LUNAI_KERNEL_OP(unpack, lunai_rows(op->in[0]) * op->in[1]->shape[1])
LUNAI_FN luna_status lunai_unpack_residual_backward(luna_op *op) {
  lunai_residual_backward(op, 5);
  return lunai_unpack_backward(op);
}

/* --- causal product: in x, y, z; arg: heads --- */
LUNAI_FN void lunai_causal_args(const luna_op *op, lunai_causal *c) {
  const luna_tensor *x = op->in[0], *z = op->in[2];
  memset(c, 0, sizeof *c);
  c->x = x->data; c->y = op->in[1]->data; c->z = z->data; c->out = op->out[0]->data;
  c->batch = x->shape[0]; c->rows = x->shape[1]; c->heads = op->arg.causal.heads;
  c->xy_row = lunai_last(x); c->z_row = lunai_last(z);
  c->dim = c->xy_head = c->xy_row / c->heads;
  c->value_dim = c->z_head = c->z_row / c->heads;
  c->xy_batch = c->rows * c->xy_row;
  c->z_batch = c->rows * c->z_row;
  c->grad_out = op->out[0]->grad;
  c->grad_x = x->grad; c->grad_y = op->in[1]->grad; c->grad_z = z->grad;
}
LUNAI_KERNEL_OP(causal, 0)

/* --- causal Luna: in q, k, v, s; arg: heads, scale; activation omega; of a stream: mean_ka, mean_av, position.
   kept: W --- */
LUNAI_FN void lunai_causal_luna_args(const luna_op *op, lunai_causal_luna *c) {
  const luna_tensor *q = op->in[0];
  lunai_clear(c, sizeof *c);
  c->q = q->data; c->k = op->in[1]->data; c->v = op->in[2]->data; c->s = op->in[3]->data;
  c->out = op->out[0]->data;
  c->w = (float *)op->kept;
  c->batch = q->shape[0]; c->rows = q->shape[1]; c->heads = op->arg.causal.heads;
  c->head_dim = lunai_last(q) / c->heads;
  c->slots = lunai_last(op->in[3]) / c->heads;
  c->lengths = op->lengths;
  c->scale = op->arg.causal.scale;
  c->activation = (int)op->activation;
  c->position = op->position ? *op->position : 0;
  c->mean_ka = op->mean_ka; c->mean_av = op->mean_av;
  c->grad_out = op->out[0]->grad;
  c->grad_q = q->grad; c->grad_k = op->in[1]->grad; c->grad_v = op->in[2]->grad; c->grad_s = op->in[3]->grad;
}
LUNAI_KERNEL_OP(causal_luna, luna_count(op->in[3]))

/* --- short convolution: in x, weight, bias; of a stream: history --- */
LUNAI_FN void lunai_convolution_sequences(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]), rows = op->in[0]->shape[1], width = lunai_last(op->in[1]);
  int64_t b;
  for (b = first; b < last; b++) {
    const float *x = op->in[0]->data + b * rows * n;
    float *history = op->history ? op->history + b * (width - 1) * n : NULL;
    lunai_k(op)->short_convolution(rows, n, width, x, history, op->in[1]->data, lunai_data(op, 2),
                                   op->out[0]->data + b * rows * n);
    if (history) lunai_history_move(history, width - 1, x, rows, n);
  }
}
LUNAI_FN void lunai_convolution_back(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]), size = op->in[0]->shape[1] * n;
  int64_t b;
  for (b = first; b < last; b++)
    lunai_k(op)->short_convolution_backward(op->in[0]->shape[1], n, lunai_last(op->in[1]), op->in[1]->data,
                                            op->out[0]->grad + b * size, op->in[0]->grad + b * size);
}
LUNAI_FN void lunai_convolution_columns(luna_op *op, int64_t first, int64_t last) {
  const int64_t n = lunai_last(op->in[0]), size = op->in[0]->shape[1] * n;
  int64_t b;
  for (b = 0; b < op->in[0]->shape[0]; b++)
    lunai_k(op)->short_convolution_weights(op->in[0]->shape[1], n, lunai_last(op->in[1]), first, last,
                                           op->in[0]->data + b * size, op->out[0]->grad + b * size,
                                           lunai_grad(op, 1), lunai_grad(op, 2));
}
LUNAI_FN luna_status lunai_convolution_forward(luna_op *op) {
  lunai_split(op, op->in[0]->shape[0], op->in[0]->shape[1] * lunai_last(op->in[0]), lunai_convolution_sequences);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_convolution_backward(luna_op *op) {
  const int64_t rows = op->in[0]->shape[0] * op->in[0]->shape[1];
  if (op->in[0]->grad)
    lunai_split(op, op->in[0]->shape[0], op->in[0]->shape[1] * lunai_last(op->in[0]), lunai_convolution_back);
  if (lunai_grad(op, 1) || lunai_grad(op, 2)) lunai_split(op, lunai_last(op->in[0]), rows, lunai_convolution_columns);
  return LUNA_OK;
}

/* --- custom --- */
LUNAI_FN void lunai_custom_query(luna_op *op) {
  op->workspace_size = op->backward_workspace_size = op->custom.workspace_size;
}
LUNAI_FN luna_status lunai_custom_forward(luna_op *op) {
  op->ctx->custom = op;
  op->custom.forward((const luna_tensor *const *)op->in, op->inputs, op->out[0], (void *)(uintptr_t)op->custom.state);
  op->ctx->custom = NULL;
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_custom_backward(luna_op *op) {
  op->ctx->custom = op;
  op->custom.backward(op->in, op->inputs, op->out[0], (void *)(uintptr_t)op->custom.state);
  op->ctx->custom = NULL;
  return LUNA_OK;
}

LUNAI_FN luna_status lunai_cpu_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  (void)ctx;
  (void)direction;
  if (bytes) memcpy(to, from, bytes);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_cpu_begin(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped) {
  (void)ctx;
  if (stepped) state->nonfinite = 0;
  state->step += training;
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_cpu_zero(luna_ctx *ctx, void *at, size_t bytes) {
  (void)ctx;
  if (bytes) memset(at, 0, bytes);
  return LUNA_OK;
}

LUNAI_FN luna_status lunai_cpu_check(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state) {
  (void)ctx;
  if (!(loss->data[0] - loss->data[0] == 0)) state->nonfinite = 1;
  return LUNA_OK;
}

/* --- the optimisers' norm and update: sums over a parameter in blocks, added in their order --- */
#define LUNAI_SUM_BLOCK 65536
typedef struct lunai_norm_work {
  const lunai_kernels *kernels; const float *x; int64_t count; double partial[64];
} lunai_norm_work;
LUNAI_FN void lunai_norm_task(void *work, int64_t thread, int64_t threads) {
  lunai_norm_work *w = (lunai_norm_work *)work;
  int64_t i;
  for (i = thread; i * LUNAI_SUM_BLOCK < w->count; i += threads)
    w->partial[i] = w->kernels->sum_squares(lunai_min(LUNAI_SUM_BLOCK, w->count - i * LUNAI_SUM_BLOCK),
                                            w->x + i * LUNAI_SUM_BLOCK);
}
LUNAI_FN luna_status lunai_cpu_norm(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                    const luna_update *table, int64_t count) {
  luna_step_state *state = rule->state;
  lunai_norm_work w;
  double sum = 0;
  int64_t p, at, i;
  w.kernels = ctx->kernels;
  for (p = 0; p < count; p++) {
    const int64_t size = parts[p].frozen ? 0 : parts[p].count;
    for (at = 0; at < size; at += 64 * LUNAI_SUM_BLOCK) {
      w.x = parts[p].grad + at;
      w.count = lunai_min(size - at, 64 * LUNAI_SUM_BLOCK);
      lunai_run(w.count > LUNAI_SUM_BLOCK ? &ctx->parallel : NULL, lunai_norm_task, &w);
      for (i = 0; i * LUNAI_SUM_BLOCK < w.count; i++) sum += w.partial[i];
    }
  }
  (void)table;
  state->norm = (float)sqrt(sum);
  state->nonfinite = ctx->state->nonfinite || !(sum < (double)INFINITY);
  state->factor = rule->clip > 0 && state->norm > rule->clip ? rule->clip / state->norm : 1.0f;
  state->updates += !state->nonfinite;
  state->skipped += (uint64_t)state->nonfinite;
  ctx->state->skipped += (uint64_t)state->nonfinite;
  state->skipped_in_row = state->nonfinite ? state->skipped_in_row + 1 : 0;
  return LUNA_OK;
}

typedef struct lunai_update_work {
  const lunai_kernels *kernels; lunai_update update; luna_optimizer_kind kind; double partial[64][3];
} lunai_update_work;
LUNAI_FN lunai_update lunai_update_part(const lunai_update *whole, int64_t first, int64_t last) {
  lunai_update u = *whole;
  int i;
  u.value += first;
  u.grad += first;
  for (i = 0; i < 3; i++) if (u.moment[i]) u.moment[i] += first;
  u.count = last - first;
  return u;
}
LUNAI_FN void lunai_update_task(void *work, int64_t thread, int64_t threads) {
  const lunai_update_work *w = (const lunai_update_work *)work;
  const int64_t units = lunai_divide_up(w->update.count, LUNAI_SPLIT);
  const int64_t first = lunai_share(units, thread, threads) * LUNAI_SPLIT;
  const int64_t last = lunai_min(lunai_share(units, thread + 1, threads) * LUNAI_SPLIT, w->update.count);
  const lunai_update u = lunai_update_part(&w->update, first, last);
  if (first < last)
    (w->kind == LUNA_OPTIMIZER_APOLLO ? w->kernels->apollo : w->kind == LUNA_OPTIMIZER_SGD ? w->kernels->sgd :
     w->kernels->adam)(&u);
}
LUNAI_FN void lunai_apollo_task(void *work, int64_t thread, int64_t threads) { /* of a part of at most 64 blocks */
  lunai_update_work *w = (lunai_update_work *)work;
  int64_t i;
  for (i = thread; i * LUNAI_SUM_BLOCK < w->update.count; i += threads) {
    const lunai_update u = lunai_update_part(&w->update, i * LUNAI_SUM_BLOCK,
                                             lunai_min((i + 1) * LUNAI_SUM_BLOCK, w->update.count));
    w->kernels->apollo_sums(&u, w->partial[i]);
  }
}
/* with D = ||d||_4 + epsilon: alpha = (1 - beta) / (1 - beta^t), curvature = (-alpha sum((g - m) d) - sum(B d^2)) /
   D^4 */
LUNAI_FN void lunai_apollo_curvature(luna_ctx *ctx, lunai_update_work *w) {
  const lunai_update whole = w->update;
  double sums[3] = { 0, 0, 0 }, d;
  int64_t at, i;
  for (at = 0; at < whole.count; at += 64 * LUNAI_SUM_BLOCK) {
    w->update = lunai_update_part(&whole, at, lunai_min(at + 64 * LUNAI_SUM_BLOCK, whole.count));
    lunai_run(w->update.count > LUNAI_SUM_BLOCK ? &ctx->parallel : NULL, lunai_apollo_task, w);
    for (i = 0; i < 3 * lunai_divide_up(w->update.count, LUNAI_SUM_BLOCK); i++) sums[i % 3] += w->partial[i / 3][i % 3];
  }
  w->update = whole;
  d = sqrt(sqrt(sums[0])) + (double)whole.epsilon;
  w->update.alpha = (1 - whole.beta1) / whole.correction1;
  w->update.curvature = (float)((-(double)w->update.alpha * sums[1] - sums[2]) / (d * d * d * d));
}
LUNAI_FN void lunai_cpu_update_one(luna_ctx *ctx, const luna_rule *rule, const luna_update *part) {
  const luna_step_state *state = rule->state;
  const double t = (double)state->updates;
  lunai_update_work w;
  int i;
  memset(&w, 0, sizeof w);
  w.kernels = ctx->kernels;
  w.kind = rule->kind;
  w.update.value = part->value;
  w.update.grad = part->grad;
  for (i = 0; i < 3; i++) w.update.moment[i] = part->moment[i];
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
  if (w.kind == LUNA_OPTIMIZER_APOLLO) lunai_apollo_curvature(ctx, &w);
  lunai_run(w.update.count > LUNAI_SPLIT ? &ctx->parallel : NULL, lunai_update_task, &w);
}
LUNAI_FN luna_status lunai_cpu_update(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                      const luna_update *table, int64_t count) {
  int64_t p;
  (void)table;
  for (p = 0; p < count; p++) {
    if (!parts[p].frozen && !rule->state->nonfinite) lunai_cpu_update_one(ctx, rule, &parts[p]);
    else if (parts[p].count) memset(parts[p].grad, 0, (size_t)parts[p].count * sizeof(float));
  }
  return LUNA_OK;
}

#define LUNAI_CPU_OP(query, forward, backward, can) \
  { lunai_##query, lunai_##forward, LUNAI_TRAIN(lunai_##backward), can }
#define LUNAI_CPU_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) \
  LUNAI_CPU_OP(elementwise_query, elementwise_forward, elementwise_backward, (inputs) | LUNA_EACH_IN_PLACE(cheap)),
#define LUNAI_CPU_REST(query, forward, backward, can) \
  { LUNAI_REST(lunai_##query), LUNAI_REST(lunai_##forward), LUNAI_TRAIN(lunai_##backward), can } /* not in streams */
static const luna_backend lunai_cpu = {
  1, sizeof(luna_backend), 0, 0, NULL, NULL, NULL, NULL, lunai_cpu_copy, lunai_cpu_zero, NULL, lunai_cpu_begin,
      LUNAI_TRAIN(lunai_cpu_check), LUNAI_TRAIN(lunai_cpu_norm), LUNAI_TRAIN(lunai_cpu_update),
  NULL, NULL, NULL, NULL,
  {
    LUNAI_CPU_OP(query_nothing, permute_forward, permute_backward, 0),
    LUNAI_CPU_OP(query_nothing, slice_forward, slice_backward, 0),
    LUNAI_CPU_REST(query_nothing, concat_forward, concat_backward, 0),
    LUNAI_CPU_REST(query_nothing, expand_forward, expand_backward, 0),
    LUNA_ELEMENTWISE(LUNAI_CPU_EACH)
    LUNAI_CPU_OP(query_nothing, same_forward, scale_backward, LUNA_FORWARD_IN_PLACE),
    LUNAI_CPU_REST(query_nothing, reduce_forward, reduce_backward, LUNA_SETS_GRAD(0)),
    LUNAI_CPU_REST(query_nothing, max_forward, max_backward, 0),
    LUNAI_CPU_REST(query_nothing, cumsum_forward, cumsum_backward, 0),
    LUNAI_CPU_OP(matmul_query, matmul_forward, matmul_backward, 0),
    LUNAI_CPU_OP(linear_query, linear_forward, linear_backward,
                 LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(3) | LUNA_TAKES_LOSS),
    LUNAI_CPU_REST(query_nothing, same_forward, activation_backward, 0),
    LUNAI_CPU_REST(query_nothing, softmax_forward, softmax_backward, 0),
    LUNAI_CPU_REST(query_nothing, mask_forward, mask_backward, 0),
    LUNAI_CPU_REST(query_nothing, ratio_forward, ratio_backward, 0),
    LUNAI_CPU_REST(query_nothing, dropout_forward, dropout_backward, LUNA_FORWARD_IN_PLACE),
    LUNAI_CPU_OP(layer_norm_query, layer_norm_forward, layer_norm_backward, LUNA_SETS_GRAD(0) | LUNA_SETS_IN_PLACE),
    LUNAI_CPU_OP(query_nothing, embedding_forward, embedding_backward, 0),
    LUNAI_CPU_REST(query_nothing, scatter_add_forward, scatter_add_backward, LUNA_GRAD_IN_PLACE(0)),
    LUNAI_CPU_REST(sinusoids_query, sinusoids_forward, sinusoids_backward, 0),
    LUNAI_CPU_REST(cross_entropy_query, cross_entropy_forward, cross_entropy_backward, LUNA_SETS_GRAD(0)),
    LUNAI_CPU_REST(attention_query, attention_forward, attention_backward, 0),
    LUNAI_CPU_REST(causal_query, causal_forward, causal_backward, 0),
    LUNAI_CPU_OP(query_nothing, convolution_forward, convolution_backward, 0),
    LUNAI_CPU_REST(custom_query, custom_forward, custom_backward, 0),
    LUNAI_CPU_REST(attention_query, attention_forward, attention_backward, 0),
    LUNAI_CPU_REST(unpack_query, unpack_forward, unpack_residual_backward,
                   LUNA_GRAD_IN_PLACE(5) | LUNA_ADDS_IN_PLACE(0)),
    LUNAI_CPU_OP(causal_luna_query, causal_luna_forward, causal_luna_backward, 0),
    LUNAI_CPU_REST(feed_forward_query, feed_forward_forward, feed_forward_backward,
                 LUNA_SETS_GRAD(0) | LUNA_GRAD_IN_PLACE(5) | LUNA_ADDS_IN_PLACE(0)),
    LUNAI_CPU_REST(linear_cross_entropy_query, linear_cross_entropy_forward, linear_cross_entropy_backward,
                 LUNA_SETS_GRAD(0)),
    LUNAI_CPU_REST(attention_query, attention_forward, attention_backward, 0)
  }
};
#undef LUNAI_CPU_EACH
#undef LUNAI_CPU_OP
#undef LUNAI_CPU_REST
LUNA_API const luna_backend *luna_cpu_backend(void) { return &lunai_cpu; }

LUNA_API const char *luna_op_name(luna_op_kind kind) {
  static const char *const names[] = {
#define LUNAI_OP_KIND(name, tier, reads, cheap) #name,
#define LUNAI_OP_EACH(name, tier, reads, cheap, function, inputs, value, da, db, dc) #name,
    LUNA_OPS(LUNAI_OP_KIND, LUNAI_OP_EACH)
#undef LUNAI_OP_EACH
#undef LUNAI_OP_KIND
  };
  return (unsigned)kind < LUNA_OP_COUNT ? names[kind] : "unknown";
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>tensors and the tape
   An op is built on the caller's stack (lunai_start), its outputs, what it keeps and its workspace are taken from the
   step (lunai_finish), the backend runs it, and it joins the tape when a gradient may be wanted. A failure undoes
   everything. Guarded by tests/ops.c.
   ------------------------------------------------------------------------------------------------------------------ */
LUNA_API int64_t luna_count(const luna_tensor *t) {
  return t ? t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3] : 0;
}

/* elements of a shape; -1 when it is none: rank, a negative size, or too many, counted with each 0 as 1, so that no
   product of some of its axes overflows */
LUNAI_FN int64_t lunai_shape_count(int rank, const int64_t *shape) {
  int64_t count = 1, bound = 1;
  int a;
  if (rank < 0 || rank > LUNA_MAX_RANK || (rank > 0 && !shape)) return -1;
  for (a = 0; a < rank; a++) {
    if (shape[a] < 0 || (bound = lunai_checked(bound, lunai_max(shape[a], 1))) < 0) return -1;
    count *= shape[a];
  }
  return count;
}

LUNAI_FN void lunai_tensor_set(luna_tensor *t, luna_ctx *ctx, int rank, const int64_t *shape) {
  int a;
  lunai_clear(t, sizeof *t);
  t->rank = rank;
  for (a = 0; a < LUNA_MAX_RANK; a++) t->shape[a] = a < rank ? shape[a] : 1;
  t->device = ctx->backend->device;
  t->ctx = ctx;
}

/* a shape for a sentence: rank 0 where it has none */
LUNAI_FN luna_tensor lunai_like(luna_ctx *ctx, int rank, const int64_t *shape) {
  luna_tensor t;
  lunai_tensor_set(&t, ctx, shape && rank > 0 && rank <= LUNA_MAX_RANK ? rank : 0, shape);
  return t;
}
LUNAI_FN luna_tensor *lunai_fail_shape(luna_ctx *ctx, const char *name, int rank, const int64_t *shape) {
  const luna_tensor like = lunai_like(ctx, rank, shape);
  return lunai_fail(ctx, LUNA_ERROR_SHAPE, name, "the shape", &like, (int64_t)rank, LUNAI_MAX_COUNT);
}

/* a tensor of the step, values not set; null without a sentence when there is no memory; count: lunai_shape_count */
LUNAI_FN luna_tensor *lunai_tensor_make(luna_ctx *ctx, int rank, const int64_t *shape, int64_t count) {
  luna_tensor *t;
  void *memory, *data;
  if (count < 0) return NULL;
  if (LUNAI_BUMPS(ctx)) {
    if (!lunai_bump_take(ctx->bump, false, sizeof(luna_tensor), &memory) ||
        !lunai_bump_take(ctx->bump, true, (size_t)count * sizeof(float), &data)) return NULL;
    t = (luna_tensor *)memory;
    lunai_tensor_set(t, ctx, rank, shape);
    t->data = (float *)data;
    return t;
  }
  if (!lunai_step_small(ctx, sizeof(luna_tensor), &memory)) return NULL;
  t = (luna_tensor *)memory;
  lunai_tensor_set(t, ctx, rank, shape);
  if (count > 0 && (t->data_piece = lunai_piece_take(ctx, (size_t)count * sizeof(float))) == NULL) return NULL;
  t->data = t->data_piece ? (float *)t->data_piece->at : NULL;
  /* nothing lies somewhere too: null + 0 is undefined */
  if (count == 0 && !ctx->options.measure) t->data = (float *)memory;
  t->older = ctx->made;
  return ctx->made = t;
}

LUNAI_FN luna_tensor *lunai_base(luna_tensor *t) { return t && t->base ? t->base : t; }

/* --- scopes --- */
LUNAI_FN void lunai_release(luna_tensor *t) {
  if (!t->data_piece) return;
  lunai_piece_give(t->ctx, &t->data_piece);
  t->data = NULL;
  t->released = true;
}

/* What an op of the tape will read in backward. A cheap op's small inputs are among it, so that its result can be
   computed again; not those made from nothing, as sinusoids are. */
LUNAI_FN void lunai_op_saves(luna_op *op) {
  int i;
  for (i = 0; i < op->inputs; i++) {
    luna_tensor *in = lunai_base(op->in[i]);
    if (!in) continue;
    in->last_reader = op;
    in->saved = in->saved || (lunai_op_reads[op->kind] & LUNA_READS_IN(i)) ||
                (lunai_op_is_cheap[op->kind] && !(in->maker && in->maker->inputs == 0) &&
                 luna_count(op->in[i]) <= luna_count(op->out[0]) / 2);
  }
  for (i = 0; i < op->outputs; i++) if (lunai_op_reads[op->kind] & LUNA_READS_OUT(i)) op->out[i]->saved = true;
}
/* whether cheap ops compute a tensor's data again, in backward, from data that are there */
LUNAI_FN bool lunai_is_recomputable(const luna_tensor *t) {
  int i;
  if (!t->maker || !lunai_op_is_cheap[t->maker->kind]) return false;
  for (i = 0; i < t->maker->inputs; i++) {
    const luna_tensor *in = lunai_base(t->maker->in[i]);
    if (in && !in->parameter && !(in->saved && !in->released) && !lunai_is_recomputable(in)) return false;
  }
  return true;
}

LUNA_API luna_scope luna_scope_begin(luna_ctx *ctx) {
  luna_scope scope;
  scope.ctx = ctx;
  scope.made = ctx ? ctx->made : NULL;
  scope.tape = ctx ? ctx->tape : NULL;
  scope.recompute = false;
  scope.used[0] = ctx && LUNAI_BUMPS(ctx) ? ctx->bump->used[0] : 0;
  scope.used[1] = ctx && LUNAI_BUMPS(ctx) ? ctx->bump->used[1] : 0;
  return scope;
}
LUNA_API luna_scope luna_scope_recompute(luna_ctx *ctx) {
  luna_scope scope = luna_scope_begin(ctx);
  scope.recompute = true;
  if (ctx) ctx->recomputing = true;
  return scope;
}
/* The ops since the scope's beginning are to be run again: what they kept goes, what they read from outside stays. */
LUNAI_FN void lunai_scope_forget(luna_scope scope) {
  luna_op *op, *first = NULL;
  int i;
  for (op = scope.ctx->tape; op && op != scope.tape; op = op->previous) first = op;
  for (op = first; op; op = op->next) {
    lunai_piece_give(scope.ctx, &op->kept_piece);
    op->kept = NULL;
    for (i = 0; i < op->inputs; i++) {
      luna_tensor *in = lunai_base(op->in[i]);
      if (in && (!in->maker || in->maker->number < first->number)) in->saved = true;
    }
  }
  if (first) scope.ctx->tape->recompute_from = first;
}
/* of a stream on the host: on a device the move would be work of its own */
LUNAI_FN luna_tensor *lunai_bump_end(luna_scope scope, luna_tensor *x) {
  lunai_bump *b = scope.ctx->bump;
  char *start = b->start[0] + scope.used[0];
  const size_t bytes = (size_t)luna_count(x) * sizeof(float);
  const float *data;
  luna_tensor *moved;
  void *memory;
  if (!x || lunai_on_device(scope.ctx)) return x;
  data = x->data;
  b->used[0] = scope.used[0];
  b->used[1] = scope.used[1];
  /* from outside */
  if ((uintptr_t)x < (uintptr_t)start || (uintptr_t)x >= (uintptr_t)(b->start[0] + b->size[0])) return x;
  moved = (luna_tensor *)(void *)start;
  memmove(moved, x, sizeof *x);
  (void)lunai_bump_take(b, false, sizeof *x, &memory);
  (void)lunai_bump_take(b, true, bytes, &memory);
  if (memory) memmove(memory, data, bytes);
  moved->data = (float *)memory;
  moved->base = NULL;
  return moved;
}
LUNA_API luna_tensor *luna_scope_end(luna_scope scope, luna_tensor *const *results, int count) {
  luna_ctx *ctx = scope.ctx;
  const bool taped = ctx && ctx->training && !ctx->paused;
  luna_tensor *t;
  int i;
  if (!results || count < 1) return NULL;
  if (!ctx || ctx->status != LUNA_OK) return results[0];
  if (LUNAI_BUMPS(ctx)) return lunai_bump_end(scope, results[0]);
  if (taped && scope.recompute) lunai_scope_forget(scope);
  for (t = ctx->made; t && t != scope.made; t = t->older) {
    const bool again = scope.recompute && t->maker;              /* its op is run again */
    const bool given = ctx->recomputing && !t->maker && t->last_reader; /* to an op that may be run again */
    for (i = 0; i < count && lunai_base(results[i]) != t; i++);
    if (i < count || t->keep_data) continue;
    if (taped && (t->saved || given) && !again && !lunai_is_recomputable(t)) t->internal = true;
    else lunai_release(t);
  }
  return results[0];
}
LUNAI_FN luna_tensor *lunai_result(luna_scope scope, luna_tensor *x) { return luna_scope_end(scope, &x, 1); }
/* x, beside which p stays, where there is one */
LUNAI_FN luna_tensor *lunai_results(luna_scope scope, luna_tensor *x, luna_tensor *p) {
  luna_tensor *results[2];
  results[0] = x;
  results[1] = p;
  return luna_scope_end(scope, results, 2);
}
/* whether a tensor's data were released: then that is the failure */
LUNAI_FN bool lunai_is_released(const luna_tensor *t, const char *name) {
  if (!t || !lunai_owner(t)->released) return false;
  lunai_fail(t->ctx, LUNA_ERROR_RELEASED, name, t);
  return true;
}
LUNA_API luna_tensor *luna_keep(luna_tensor *t) {
  if (!t) return NULL;
  if (lunai_is_released(t, "luna_keep")) return NULL;
  lunai_base(t)->keep_data = true;
  return t;
}

LUNA_API luna_tensor *luna_tensor_new(luna_ctx *ctx, const float *values, int rank, const int64_t *shape) {
  const int64_t count = lunai_shape_count(rank, shape);
  luna_tensor *t;
  lunai_mark mark;
  luna_status status;
  size_t bytes;
  if (!ctx) return NULL;
  if (count < 0) return lunai_fail_shape(ctx, "luna_tensor_new", rank, shape);
  mark = lunai_step_mark(ctx);
  bytes = (size_t)count * sizeof(float);
  t = lunai_tensor_make(ctx, rank, shape, count);
  if (!t) {
    lunai_step_rewind(ctx, mark);
    return lunai_fail_op_memory(ctx, "luna_tensor_new", bytes);
  }
  if (!lunai_computes(ctx) || count == 0) return t;
  status = values ? ctx->backend->copy(ctx, t->data, values, bytes, 1) : ctx->backend->zero(ctx, t->data, bytes);
  return status == LUNA_OK ? t : lunai_fail_backend(ctx, false, "luna_tensor_new", status);
}

LUNA_API luna_tensor *luna_require_grad(luna_tensor *t) {
  if (t) t->needs_grad = t->keep_grad = true;
  if (t && t->base) t->base->keep_grad = true;
  return t;
}

/* Reports the steps that optimisers skipped on the device. It is asked only when it is read anyway, and for each
   optimiser only when steps were skipped. */
#ifdef LUNA_ONLY_STREAM
LUNAI_INLINE void lunai_look_at_optimizers(luna_ctx *ctx, bool skipped) { (void)ctx; (void)skipped; }
#else
LUNAI_FN void lunai_look_at_optimizers(luna_ctx *ctx, bool skipped);
#endif
LUNAI_FN void lunai_look(luna_ctx *ctx) {
  char sentence[160];
  luna_step_state now;
  bool skipped;
  if (!ctx->options.log && !ctx->unread) return;
  now = lunai_state_of(ctx, ctx->state);
  skipped = now.skipped != ctx->reported;
  lunai_look_at_optimizers(ctx, skipped);
  ctx->reported = now.skipped;
  ctx->unread = false;
  if (!skipped || !ctx->options.log) return;
  lunai_print(sentence, sizeof sentence,
              "luna_optimizer_step: %d steps skipped up to step %d: the loss or a gradient was not finite",
              (int64_t)now.skipped, (int64_t)now.step);
  ctx->options.log(ctx->options.log_user, LUNA_OK, sentence);
}

LUNAI_FN luna_status lunai_read_floats(const luna_tensor *t, const float *from, float *out, const char *name,
                                       bool grad) {
  const size_t bytes = (size_t)luna_count(t) * sizeof(float);
  if (!t) return LUNA_BAD_ARGUMENT;
  if (!out) return lunai_fail_status(t->ctx, LUNA_ERROR_NULL_ARGUMENT, name, "out");
  if (!lunai_computes(t->ctx)) {
    memset(out, 0, bytes);
    return LUNA_OK;
  }
  if (!from && bytes && grad) return lunai_fail_status(t->ctx, LUNA_ERROR_NO_GRAD, t);
  if (!from && bytes) return lunai_fail_status(t->ctx, LUNA_ERROR_RELEASED, name, t);
  lunai_look(t->ctx);
  return t->ctx->backend->copy(t->ctx, out, from, bytes, 2);
}
LUNAI_FN luna_status lunai_read_data(const luna_tensor *t, float *out, const char *name) {
  if (t && lunai_owner(t)->released) return lunai_fail_status(t->ctx, LUNA_ERROR_RELEASED, name, t);
  return lunai_read_floats(t, t ? t->data : NULL, out, name, false);
}
LUNA_API luna_status luna_read(const luna_tensor *t, float *out) { return lunai_read_data(t, out, "luna_read"); }
LUNA_API luna_status luna_read_grad(const luna_tensor *t, float *out) {
  const float *grad = !t ? NULL : t->base ? (t->base->grad ? t->base->grad + t->offset : NULL) : t->grad;
  return lunai_read_floats(t, grad, out, "luna_read_grad", true);
}
#ifndef LUNA_ONLY_STREAM
/* A tensor's values on the host, in memory of the step where they are not there already, which the caller gives back by
   `mark`; null where the context measures. */
LUNAI_FN luna_status lunai_host_values(const luna_tensor *t, const char *name, lunai_mark *mark, const float **values) {
  const size_t bytes = (size_t)luna_count(t) * sizeof(float);
  void *memory = NULL;
  luna_status status;
  *mark = lunai_step_mark(t->ctx);
  *values = t->data;
  if (lunai_owner(t)->released || (lunai_computes(t->ctx) && !t->data && bytes)) return lunai_fail_status(t->ctx,
      LUNA_ERROR_RELEASED, name, t);
  if (!lunai_on_device(t->ctx)) return LUNA_OK;
  if (!lunai_step(t->ctx, bytes, false, &memory)) return lunai_fail_memory(t->ctx, name, bytes);
  *values = (const float *)memory;
  status = lunai_computes(t->ctx) && bytes ? lunai_read_data(t, (float *)memory, name) : LUNA_OK;
  if (status != LUNA_OK || !lunai_computes(t->ctx)) *values = NULL;
  return status;
}
LUNAI_FN luna_status lunai_top_k(const luna_tensor *x, int64_t k, int32_t *indices, float *values, const char *name) {
  const int64_t n = x ? lunai_last(x) : 0, rows = x ? lunai_rows(x) : 0;
  const float *from;
  lunai_mark mark;
  luna_status status;
  int64_t r, i, at;
  if (!x) return LUNA_BAD_ARGUMENT;
  if (!lunai_in(x->ctx, name, "k", k, 1, n <= INT32_MAX ? n : 0)) return x->ctx->last_status;
  if (!indices && rows > 0) return lunai_fail_status(x->ctx, LUNA_ERROR_NULL_ARGUMENT, name, "indices");
  status = lunai_host_values(x, name, &mark, &from);
  for (r = 0; r < rows && status == LUNA_OK; r++) {
    int32_t *best = indices + r * k;
    const float *row = from ? from + r * n : NULL;
    int64_t count = 0;
    for (i = 0; i < n && row; i++) { /* best: the largest so far in falling order */
      for (at = count; at > 0 && (row[i] > row[best[at - 1]] || (row[i] != row[i] &&
          row[best[at - 1]] == row[best[at - 1]])); at--)
        if (at < k) best[at] = best[at - 1];
      if (at < k) best[at] = (int32_t)i;
      count = lunai_min(count + 1, k);
    }
    for (i = 0; i < k; i++) {
      if (!row) best[i] = 0;
      if (values) values[r * k + i] = row ? row[best[i]] : 0;
    }
  }
  lunai_step_rewind(x->ctx, mark);
  return status;
}
LUNA_API luna_status luna_top_k(const luna_tensor *x, int64_t k, int32_t *indices, float *values) {
  return lunai_top_k(x, k, indices, values, "luna_top_k");
}
LUNA_API luna_status luna_argmax(const luna_tensor *x, int32_t *indices) {
  return lunai_top_k(x, 1, indices, NULL, "luna_argmax");
}

/* write: null measures the widest number */
typedef struct lunai_printing {
  const luna_tensor *t;
  const float *values;
  void (*write)(void *user, const char *text);
  void *user;
  int64_t width, edge;               /* of a number; of each axis longer than 2 edge so many at both ends; 0 = all */
} lunai_printing;
LUNAI_FN void lunai_print_number(lunai_printing *p, float value) {
  char room[64];
  int64_t i, n;
  lunai_text text;
  text.at = room;
  text.end = room + sizeof room - 1;
  lunai_put_real(&text, (double)value);
  *text.at = 0;
  n = text.at - room;
  if (!p->write) p->width = lunai_max(p->width, n);
  for (i = n; p->write && i < p->width; i++) p->write(p->user, " ");
  if (p->write) p->write(p->user, room);
}
LUNAI_FN void lunai_print_axis(lunai_printing *p, int axis, int64_t offset) {
  const int rank = p->t->rank;
  int64_t size, i, inner = 1;
  int a;
  if (axis == rank) {
    lunai_print_number(p, p->values[offset]);
    return;
  }
  size = p->t->shape[axis];
  for (a = axis + 1; a < rank; a++) inner *= p->t->shape[a];
  if (p->write) p->write(p->user, "[");
  for (i = 0; i < size; i++) {
    const bool gap = p->edge > 0 && size > 2 * p->edge && i == p->edge;
    for (a = axis + 1; a < rank && p->write && i > 0; a++) p->write(p->user, "\n"); /* one empty line an axis */
    for (a = 0; a <= axis && axis + 1 < rank && p->write && i > 0; a++) p->write(p->user, " ");
    if (axis + 1 == rank && p->write && i > 0) p->write(p->user, " ");
    if (gap) {
      if (p->write) p->write(p->user, "...");
      i = size - p->edge - 1;
    } else lunai_print_axis(p, axis + 1, offset + i * inner);
  }
  if (p->write) p->write(p->user, "]");
}
LUNA_API luna_status luna_print(const luna_tensor *t, void (*write)(void *user, const char *text), void *user) {
  lunai_printing p;
  lunai_mark mark;
  luna_status status;
  if (!t) return LUNA_BAD_ARGUMENT;
  if (!write) return lunai_fail_status(t->ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_print", "write");
  memset(&p, 0, sizeof p);
  p.t = t;
  p.edge = luna_count(t) > 1000 ? 3 : 0;
  status = lunai_host_values(t, "luna_print", &mark, &p.values);
  if (status == LUNA_OK && luna_count(t) > 0 && p.values) {
    lunai_print_axis(&p, 0, 0);
    p.write = write;
    p.user = user;
    lunai_print_axis(&p, 0, 0);
  } else if (status == LUNA_OK) write(user, "[]");
  if (status == LUNA_OK) write(user, "\n");
  lunai_step_rewind(t->ctx, mark);
  return status;
}
#endif
LUNA_API luna_status luna_write(luna_tensor *t, const float *values) {
  const size_t bytes = (size_t)luna_count(t) * sizeof(float);
  if (!t) return LUNA_BAD_ARGUMENT;
  if (t->borrowed) return lunai_fail_status(t->ctx, LUNA_ERROR_WRITE_BORROWED, t);
  if (!values && bytes) return lunai_fail_status(t->ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_write", "values");
  if (!lunai_computes(t->ctx)) return LUNA_OK;
  if (lunai_owner(t)->released || (!t->data && bytes))
    return lunai_fail_status(t->ctx, LUNA_ERROR_RELEASED, "luna_write", t);
  return t->ctx->backend->copy(t->ctx, t->data, values, bytes, 1);
}
LUNA_API float luna_item(const luna_tensor *t) {
  float value = NAN;
  if (t && luna_count(t) != 1) lunai_fail(t->ctx, LUNA_ERROR_NOT_ONE_ELEMENT, "luna_item", t, luna_count(t));
  else if (t && lunai_read_data(t, &value, "luna_item") != LUNA_OK) value = NAN;
  return value;
}

/* --- building an op --- */
typedef struct lunai_build { luna_op op; lunai_mark mark; const char *name; } lunai_build;

LUNAI_FN void lunai_start_in(lunai_build *s, luna_ctx *ctx, luna_op_kind kind, const char *name) {
  lunai_clear(&s->op, sizeof s->op);
  s->name = name;
  if (LUNAI_BUMPS(ctx)) memcpy(s->mark.bytes, ctx->bump->used, sizeof s->mark.bytes);
  else s->mark = lunai_step_mark(ctx);
  s->op.kind = kind;
  s->op.ctx = ctx;
  s->op.outputs = 1;
}
/* inputs a, b, c: as many as `inputs` says, none null */
LUNAI_FN bool lunai_start(lunai_build *s, luna_op_kind kind, const char *name, int inputs, luna_tensor *a,
                          luna_tensor *b, luna_tensor *c) {
  luna_ctx *ctx = a ? a->ctx : inputs > 1 && b ? b->ctx : inputs > 2 && c ? c->ctx : NULL;
  int i;
  if (!ctx) return false;
  lunai_start_in(s, ctx, kind, name);
  s->op.inputs = inputs;
  s->op.in[0] = a;
  s->op.in[1] = inputs > 1 ? b : NULL;
  s->op.in[2] = inputs > 2 ? c : NULL;
  for (i = 0; i < inputs; i++)
    if (!LUNAI_BUMPS(ctx) && lunai_is_released(s->op.in[i], name)) return false;
    else if (!s->op.in[i])
      return lunai_fail_null(ctx, name, i == 0 ? "the first input" : i == 1 ? "the second input" :
                             "the third input") != NULL;
  return true;
}
/* Whether an array's inputs are all non-null. If not, or if they are too many, the context of the first one that is
   not null fails. */
LUNAI_FN bool lunai_all(luna_tensor *const *x, int count, const char *name) {
  luna_ctx *ctx = NULL;
  int i, missing = 0;
  for (i = 0; x && i < count && i < LUNA_MAX_INPUTS; i++) {
    missing += !x[i];
    if (!ctx && x[i]) ctx = x[i]->ctx;
  }
  if (ctx && count > LUNA_MAX_INPUTS)
    lunai_fail(ctx, LUNA_ERROR_TOO_MANY_TENSORS, name, (int64_t)count, (int64_t)LUNA_MAX_INPUTS);
  else if (ctx && missing) lunai_fail_null(ctx, name, "one of the tensors");
  return ctx && !missing && count <= LUNA_MAX_INPUTS;
}
/* one more input, which may be null */
LUNAI_FN void lunai_input(lunai_build *s, luna_tensor *t) { s->op.in[s->op.inputs++] = t; }

/* Copies host integers into the step; null: no memory, or the backend failed */
LUNAI_FN const int32_t *lunai_integers_copy(lunai_build *s, const int32_t *values, int64_t count) {
  luna_ctx *ctx = s->op.ctx;
  void *memory;
  luna_status status;
  if (!lunai_step(ctx, (size_t)lunai_max(1, count) * sizeof(int32_t), lunai_on_device(ctx), &memory)) {
    lunai_fail_op_memory(ctx, s->name, (size_t)count * sizeof(int32_t));
    return NULL;
  }
  if (!memory) return values;        /* on a device, counted alone */
  status = ctx->options.measure ? LUNA_OK : ctx->backend->copy(ctx, memory, values, (size_t)count * sizeof(int32_t), 1);
  if (status == LUNA_OK) return (const int32_t *)memory;
  lunai_fail_backend(ctx, false, s->name, status);
  return NULL;
}
/* the same, each checked to be in [min, max]; null when null; a stream's are checked, and in backend memory */
LUNAI_FN const int32_t *lunai_integers(lunai_build *s, const int32_t *values, int64_t count, int64_t min, int64_t max,
                                       const char *what, bool *failed) {
  luna_ctx *ctx = s->op.ctx;
  const int32_t *kept;
  int64_t i;
  if (!values || *failed) return NULL;
  if (LUNAI_BUMPS(ctx)) return values;
  *failed = true;
  for (i = 0; i < count; i++)
    if (values[i] < min || values[i] > max) {
      lunai_fail(ctx, LUNA_ERROR_ELEMENT_RANGE, s->name, what, i, (int64_t)values[i], min, max);
      return NULL;
    }
  kept = lunai_integers_copy(s, values, count);
  *failed = kept == NULL;
  return kept;
}

LUNAI_FN luna_tensor *lunai_abandon(lunai_build *s) {
  lunai_step_rewind(s->op.ctx, s->mark);
  return NULL;
}
LUNAI_FN luna_tensor *lunai_op_no_memory(lunai_build *s, size_t bytes) {
  lunai_fail_op_memory(s->op.ctx, s->name, bytes);
  return lunai_abandon(s);
}

/* A result of no elements is not computed: an op may still have 2^40 rows of nothing. */
LUNAI_FN bool lunai_is_empty(const luna_op *op) { return luna_count(op->out[0]) == 0; }
LUNAI_FN bool lunai_is_run(const luna_op *op) { return lunai_computes(op->ctx) && !lunai_is_empty(op); }

/* Runs an op's forward with memory for what it keeps and for its workspace; false: *status, or no memory where that is
   LUNA_OK */
LUNAI_FN bool lunai_op_run(luna_op *op, luna_status *status) {
  luna_ctx *ctx = op->ctx;
  lunai_piece *workspace = NULL;
  lunai_mark mark;
  bool good;
  *status = LUNA_OK;
  if (op->kept_size > 0 && !op->kept_piece) {
    if ((op->kept_piece = lunai_piece_take(ctx, op->kept_size)) == NULL) return false;
    op->kept = op->kept_piece->at;
  }
  mark = lunai_step_mark(ctx);
  if (lunai_pieces_split(ctx) && op->workspace_size > 0) { /* memory between other pieces will do */
    good = (workspace = lunai_piece_take(ctx, op->workspace_size)) != NULL;
    op->workspace = workspace ? workspace->at : NULL;
  } else good = lunai_step(ctx, op->workspace_size, true, &op->workspace);
  if (good && lunai_is_run(op)) *status = ctx->backend->op[op->kind].forward(op);
  if (workspace) lunai_piece_give(ctx, &workspace);
  else lunai_step_rewind(ctx, mark);
  return good && *status == LUNA_OK;
}

/* The same in a stream, whose tensors are all its own, and stay until their memory is taken again */
LUNAI_FN luna_tensor *lunai_bump_finish(lunai_build *s, int rank, const int64_t *shape, int64_t count) {
  luna_op *op = &s->op;
  luna_ctx *ctx = op->ctx;
  const luna_op_functions *functions = &ctx->backend->op[op->kind];
  luna_status status = LUNA_OK;
  size_t used;
  op->dropout = op->last_dropout = 0;
  if ((op->out[0] = lunai_tensor_make(ctx, rank, shape, count)) == NULL)
    return lunai_op_no_memory(s, (size_t)count * sizeof(float));
  if (count == 0) return op->out[0];
  functions->query(op);
  used = ctx->bump->used[1];
  if (op->workspace_size > 0 && !lunai_bump_take(ctx->bump, true, op->workspace_size, &op->workspace))
    return lunai_op_no_memory(s, op->workspace_size);
  ctx->bump->used[1] = used;
  if (lunai_computes(ctx)) status = functions->forward(op);
  if (status == LUNA_OK) return op->out[0];
  lunai_fail_backend(ctx, false, s->name, status);
  return lunai_abandon(s);
}

/* Takes the output (and `extra`, a second one, when asked), runs the op, puts it on the tape. */
LUNAI_FN luna_tensor *lunai_finish_two(lunai_build *s, int rank, const int64_t *shape, luna_tensor **extra,
                                       int extra_rank, const int64_t *extra_shape) {
  luna_ctx *ctx = s->op.ctx;
  luna_op *op = &s->op;
  luna_status status;
  bool wanted = false, record;       /* a gradient; on the tape, where an op of no inputs is too: it may be run again */
  void *memory;
  const int64_t count = lunai_shape_count(rank, shape);
  const size_t result = (size_t)count * sizeof(float);
  int i;
  if (LUNAI_BUMPS(ctx)) return lunai_bump_finish(s, rank, shape, count);
  if (!ctx->backend->op[op->kind].forward) {
    lunai_fail(ctx, LUNA_ERROR_NO_OP, s->name, luna_op_name(op->kind));
    return lunai_abandon(s);
  }
  for (i = 0; i < op->inputs; i++) {
    if (op->in[i] && op->in[i]->ctx != ctx) {
      lunai_fail(ctx, LUNA_ERROR_OTHER_CONTEXT, s->name, (int64_t)i);
      return lunai_abandon(s);
    }
    if (lunai_is_released(op->in[i], s->name)) return lunai_abandon(s);
    if (op->in[i] && op->in[i]->needs_grad) wanted = true;
  }
  wanted = LUNAI_TRAINS && wanted && ctx->training && !ctx->paused;
  record = wanted || (LUNAI_TRAINS && op->inputs == 0 && ctx->training && !ctx->paused);
  if (count < 0) {
    lunai_fail_shape(ctx, s->name, rank, shape);
    return lunai_abandon(s);
  }
  if (record) {
    if (!lunai_step_small(ctx, sizeof(luna_op), &memory)) return lunai_op_no_memory(s, sizeof(luna_op));
    op = (luna_op *)memory;
    *op = s->op;
  }
  op->training = record;
  if (!LUNAI_TRAINS || !ctx->training) op->dropout = 0;
  if (op->dropout > 0) op->dropout_op = ctx->dropout_ops++;
  if (!LUNAI_TRAINS || !ctx->training) op->last_dropout = 0;
  if (op->last_dropout > 0) op->last_dropout_op = ctx->dropout_ops++;
  if ((op->out[0] = lunai_tensor_make(ctx, rank, shape, count)) == NULL)
    return lunai_op_no_memory(s, result);
  if (extra && (op->out[op->outputs++] = lunai_tensor_make(ctx, extra_rank, extra_shape,
                                                           lunai_shape_count(extra_rank, extra_shape))) == NULL)
    return lunai_op_no_memory(s, result);
  if (!lunai_is_empty(op)) ctx->backend->op[op->kind].query(op);
  if (!lunai_op_run(op, &status)) {
    lunai_piece_give(ctx, &op->kept_piece);
    if (status == LUNA_OK) return lunai_op_no_memory(s, op->kept_size + op->workspace_size);
    lunai_fail_backend(ctx, false, s->name, status);
    return lunai_abandon(s);
  }
  for (i = 0; i < op->outputs; i++) op->out[i]->needs_grad = wanted;
  if (extra) *extra = op->out[1];
  if (record) {
    lunai_op_saves(op);
    for (i = 0; i < op->outputs; i++) op->out[i]->maker = op;
    op->previous = ctx->tape;
    if (op->previous) op->previous->next = op;
    op->number = op->previous ? op->previous->number + 1 : 0;
    ctx->tape = op;
  }
  return op->out[0];
}
LUNAI_FN luna_tensor *lunai_finish(lunai_build *s, int rank, const int64_t *shape) {
  return lunai_finish_two(s, rank, shape, NULL, 0, NULL);
}
/* in[0]'s shape but for the last axis */
LUNAI_FN luna_tensor *lunai_finish_rows(lunai_build *s, int64_t last) {
  int64_t shape[LUNA_MAX_RANK];
  memcpy(shape, s->op.in[0]->shape, sizeof shape);
  shape[s->op.in[0]->rank - 1] = last;
  return lunai_finish(s, s->op.in[0]->rank, shape);
}
LUNAI_FN luna_tensor *lunai_finish_like(lunai_build *s, const luna_tensor *t) {
  return lunai_finish(s, t->rank, t->shape);
}

/* --- backward --- */
#ifndef LUNA_NO_TRAIN
/* the gradient of a tensor that wants one: when new, zeros unless `set`; of a view, its part of the owner's */
LUNAI_FN bool lunai_grad_take(luna_ctx *ctx, luna_tensor *t, bool set) {
  luna_tensor *owner = t->base ? t->base : t;
  const size_t bytes = (size_t)luna_count(owner) * sizeof(float);
  void *memory = NULL;
  if (!owner->has_grad) {
    if (owner->maker && !owner->keep_grad && !t->keep_grad) {
      if ((owner->grad_piece = lunai_piece_take(ctx, bytes)) == NULL) return false;
      memory = owner->grad_piece->at;
    } else if (!(owner->parameter ? lunai_persist(ctx, bytes, true, &memory) :
                 lunai_step(ctx, bytes, true, &memory))) return false;
    owner->grad = (float *)memory;
    owner->has_grad = true;
    if (owner->parameter) {
      owner->reserved = ctx->reserved;
      ctx->reserved = owner;
    }
    if (memory && !set && !ctx->reserving && ctx->backend->zero(ctx, memory, bytes) != LUNA_OK) return false;
  }
  t->has_grad = true;
  if (t->base && owner->grad) t->grad = owner->grad + t->offset;
  return true;
}

/* what the backend's functions can do: nothing for an empty result, where they are not called */
LUNAI_FN int lunai_op_can(const luna_op *op) { return lunai_is_empty(op) ? 0 : op->ctx->backend->op[op->kind].can; }
/* bits of an op's inputs that are one tensor with in[at], or views of it */
LUNAI_FN int lunai_same_inputs(const luna_op *op, int at) {
  int i, same = 0;
  for (i = 0; i < op->inputs; i++) if (lunai_owner(op->in[i]) == lunai_owner(op->in[at])) same |= 1 << i;
  return same;
}
LUNAI_FN bool lunai_is_single(const luna_op *op, int at) { return lunai_same_inputs(op, at) == 1 << at; }

/* the data of an input, recomputed by its op when it was released; what that needed is released at once */
LUNAI_FN bool lunai_recompute_data(luna_ctx *ctx, luna_tensor *t, luna_status *status) {
  luna_tensor *owner = t->base ? t->base : t;
  luna_tensor *first;
  luna_op *op = owner->maker;
  bool again[LUNA_MAX_INPUTS];
  int i;
  if (owner->released) {
    for (i = 0; i < op->inputs; i++) {
      luna_tensor *in = op->in[i] && op->in[i]->base ? op->in[i]->base : op->in[i];
      again[i] = in && in->released;
      if (in && !lunai_recompute_data(ctx, op->in[i], status)) return false;
    }
    first = op->inputs > 0 ? lunai_base(op->in[0]) : NULL;
    if (first && again[0] && (lunai_op_can(op) & LUNA_FORWARD_IN_PLACE) && luna_count(first) == luna_count(owner) &&
        lunai_is_single(op, 0)) {
      owner->data_piece = first->data_piece;
      first->data_piece = NULL;
    } else if ((owner->data_piece = lunai_piece_take(ctx, (size_t)luna_count(owner) * sizeof(float))) ==
               NULL) return false;
    owner->data = (float *)owner->data_piece->at;
    owner->released = false;
    owner->recomputed = true;
    if (!lunai_op_run(op, status)) return false;
    if (first && !first->data_piece && again[0]) { /* its data have become these */
      first->data = NULL;
      first->released = true;
    }
    for (i = 0; i < op->inputs; i++) if (again[i]) lunai_release(lunai_base(op->in[i]));
  }
  if (t->base && owner->data) t->data = owner->data + t->offset;
  return true;
}

/* Runs the ops of a recomputed scope again, of which `newest` is the newest. What no later op of them reads and
   backward does not need is released at once. */
LUNAI_FN bool lunai_scope_again(luna_op *newest, luna_status *status) {
  luna_ctx *ctx = newest->ctx;
  luna_op *op = newest->recompute_from;
  int i;
  for (;; op = op->next) {
    for (i = 0; i < op->inputs; i++) if (op->in[i] && !lunai_recompute_data(ctx, op->in[i], status)) return false;
    for (i = 0; i < op->outputs; i++) {
      luna_tensor *out = op->out[i];
      if (!out->released) continue;
      if ((out->data_piece = lunai_piece_take(ctx, (size_t)luna_count(out) * sizeof(float))) == NULL) return false;
      out->data = (float *)out->data_piece->at;
      out->released = false;
      out->recomputed = true;
    }
    op->kept_again = op->kept_again || !op->kept_piece;
    if (!lunai_op_run(op, status)) return false;
    for (i = 0; i < op->inputs; i++) {
      luna_tensor *in = lunai_base(op->in[i]);
      if (in && in->recomputed && in->last_reader == op && !in->saved) lunai_release(in);
    }
    if (op == newest) return true;
  }
}

/* whether an op is the newest of a recomputed scope, to which backward has come */
LUNAI_FN bool lunai_scope_is_reached(const luna_op *op) {
  const luna_op *first = op->recompute_from;
  int i;
  for (; first; op = op->previous) {
    for (i = 0; i < op->outputs; i++) if (op->out[i]->has_grad) return true;
    if (op == first) return false;
  }
  return false;
}

/* an op's result whose gradient nothing has reached yet, and nobody keeps */
LUNAI_FN bool lunai_is_new(const luna_tensor *t) { return t->needs_grad && !t->has_grad && t->maker && !t->keep_grad; }

/* Releases a result's data when all that read it have run their backward, unless somebody else may want them. The walk
   that only counts memory gives back what it did not compute again itself, and takes it again when it is over. */
LUNAI_FN void lunai_result_done(luna_tensor *t) {
  if (t->keep_data || !t->data_piece || !(t->recomputed || t->internal)) return;
  if (t->recomputed || !t->ctx->reserving) {
    lunai_release(t);
    return;
  }
  t->given_piece = t->data_piece;
  lunai_piece_give(t->ctx, &t->data_piece);
}
/* What nothing reads any more once an op's backward is over: its results' gradients and data, and what it kept, which
   the walk that only counts memory leaves to the next. */
LUNAI_FN void lunai_op_done(luna_op *op) {
  luna_ctx *ctx = op->ctx;
  lunai_piece *kept = op->kept_piece;
  int i;
  lunai_piece_give(ctx, &kept);
  if (!ctx->reserving) op->kept_piece = NULL;
  for (i = 0; i < op->outputs; i++) {
    luna_tensor *out = op->out[i];
    lunai_result_done(out);
    if (out->maker == op && !out->keep_grad) {
      lunai_piece_give(ctx, &out->grad_piece);
      out->grad = NULL;
      out->has_grad = false;
    }
  }
}

/* Leaves the gradient of a cross-entropy's logits to the LINEAR op that made them, which stores only parts of it at a
   time. False where that op cannot, or where the gradient is kept or has other parts: something has reached it, or an
   op between the two reads the logits and still may. */
LUNAI_FN bool lunai_leave_gradient(luna_op *loss) {
  const luna_tensor *logits = lunai_owner(loss->in[0]);
  luna_op *maker = logits->maker;
  const luna_op *op;
  int i;
  if (loss->kind != LUNA_OP_CROSS_ENTROPY || !maker || maker->kind != LUNA_OP_LINEAR) return false;
  if (!(lunai_op_can(maker) & LUNA_TAKES_LOSS) || lunai_linear_changes(maker) || maker->in[3]) return false;
  if (lunai_last(logits) <= LUNAI_LOGIT_COLUMNS) return false;
  if (!lunai_is_new(logits) || loss->in[0]->keep_grad || logits->released) return false;
  if (luna_count(loss->in[0]) != luna_count(logits) || lunai_last(loss->in[0]) != lunai_last(logits)) return false;
  for (op = loss->previous; op && op != maker; op = op->previous)
    for (i = 0; i < op->inputs; i++) if (lunai_owner(op->in[i]) == logits) return false;
  if (!op) return false;
  maker->loss = loss;
  maker->ctx->backend->op[maker->kind].query(maker);
  return true;
}

/* whether the gradient of an op's result becomes that of its input in place */
LUNAI_FN bool lunai_grad_in_place(const luna_op *op, int i) {
  const int can = lunai_op_can(op), others = lunai_same_inputs(op, i) & ~(1 << i);
  return (can & LUNA_GRAD_IN_PLACE(i)) && op->in[i] && op->out[0]->grad_piece && lunai_is_new(op->in[i]) &&
         luna_count(op->in[i]) == luna_count(op->out[0]) &&
         (others & ~(can / LUNA_ADDS_IN_PLACE(0))) == 0;
}

LUNAI_FN bool lunai_sets_in_place(const luna_op *op) {
  return (lunai_op_can(op) & LUNA_SETS_IN_PLACE) && op->in[0] && op->out[0]->grad_piece && lunai_is_new(op->in[0]) &&
         lunai_is_single(op, 0);
}

LUNAI_FN bool lunai_op_backward(luna_op *op, luna_status *status) {
  luna_ctx *ctx = op->ctx;
  lunai_mark mark;
  const int can = lunai_op_can(op);
  bool reached = op->loss != NULL;
  int i;
  *status = LUNA_OK;
  for (i = 0; i < op->outputs; i++) reached = reached || op->out[i]->has_grad;
  if (!reached) {
    lunai_op_done(op);
    return true;
  }
  if (lunai_leave_gradient(op)) return true;
  for (i = 0; i < op->outputs && !op->loss; i++) if (!lunai_grad_take(ctx, op->out[i], false)) return false;
  for (i = 0; i < op->outputs; i++)
    if (!(lunai_op_reads[op->kind] & LUNA_READS_OUT(i)) && !op->loss) lunai_result_done(op->out[i]);
  for (i = 0; i < op->inputs; i++)
    if (op->in[i] && (lunai_op_reads[op->kind] & LUNA_READS_IN(i)) && !lunai_recompute_data(ctx, op->in[i], status))
      return false;
  op->sets = lunai_sets_in_place(op) ? 1 : 0;
  for (i = 0; i < op->inputs; i++)
    if (op->sets >> i || lunai_grad_in_place(op, i)) {
      op->in[i]->grad = op->out[0]->grad;
      op->in[i]->grad_piece = op->out[0]->grad_piece;
      op->in[i]->has_grad = true;
      op->out[0]->grad_piece = NULL;
    }
  for (i = 0; i < op->inputs; i++) {
    const bool set = (can & LUNA_SETS_GRAD(i)) && op->in[i] && lunai_is_new(op->in[i]) && lunai_is_single(op, i);
    if (set) op->sets |= 1 << i;
    if (op->in[i] && op->in[i]->needs_grad && !lunai_grad_take(ctx, op->in[i], set)) return false;
  }
  mark = lunai_step_mark(ctx);
  if (!lunai_step(ctx, op->backward_workspace_size, true, &op->workspace)) return false;
  if (lunai_is_run(op)) *status = ctx->backend->op[op->kind].backward(op);
  lunai_step_rewind(ctx, mark);
  lunai_op_done(op);
  if (op->loss) lunai_op_done(op->loss);
  op->loss = NULL;
  return *status == LUNA_OK;
}

LUNAI_FN luna_status lunai_walk_failed(luna_ctx *ctx, const luna_op *op, luna_status status) {
  char name[64];
  size_t bytes = op->backward_workspace_size;
  int i;
  for (i = 0; i < op->inputs; i++)
    if (op->in[i] && op->in[i]->needs_grad) bytes += (size_t)luna_count(op->in[i]) * sizeof(float);
  if (status == LUNA_OK) return lunai_fail_memory(ctx, "luna_backward", bytes);
  lunai_print(name, sizeof name, "luna_backward of %s", luna_op_name(op->kind));
  return lunai_backend_result(ctx, name, status);
}

/* from the loss back over the tape */
LUNAI_FN luna_status lunai_walk_back(luna_tensor *loss) {
  const float one = 1;
  luna_ctx *ctx = loss->ctx;
  luna_status status = LUNA_OK;
  luna_op *op, *again = NULL;        /* the oldest op of the outermost recomputed scope under way */
  if (!lunai_grad_take(ctx, loss, true)) return lunai_fail_memory(ctx, "luna_backward", sizeof(float));
  if (lunai_computes(ctx)) status = ctx->backend->copy(ctx, loss->grad, &one, sizeof one, 1);
  if (lunai_computes(ctx) && status == LUNA_OK) status = ctx->backend->check(ctx, loss, ctx->state);
  if (status != LUNA_OK) return lunai_backend_result(ctx, "luna_backward", status);
  for (op = ctx->tape; op; op = op->previous) {
    if (!again && lunai_scope_is_reached(op)) {
      again = op->recompute_from;
      if (!lunai_scope_again(op, &status)) return lunai_walk_failed(ctx, op, status);
    }
    if (!lunai_op_backward(op, &status)) return lunai_walk_failed(ctx, op, status);
    if (op == again) again = NULL;
  }
  return LUNA_OK;
}

/* a tensor of the tape as it was before a walk that computed nothing */
LUNAI_FN void lunai_unwalk(luna_tensor *t) {
  if (!t || t->parameter) return;
  lunai_unwalk(t->base);
  t->grad = NULL;
  t->grad_piece = NULL;
  t->has_grad = false;
  if (t->given_piece) t->data_piece = t->given_piece;
  t->given_piece = NULL;
  if (!t->recomputed) return;
  t->data = NULL;
  t->data_piece = NULL;
  t->released = true;
  t->recomputed = false;
}

/* Walks the tape once without computing, to take all the memory that the walk which computes will need, first gradients
   of parameters included: they stay, zero. On failure nothing has changed. */
LUNAI_FN luna_status lunai_reserve_backward(luna_tensor *loss) {
  luna_ctx *ctx = loss->ctx;
  const lunai_mark mark = lunai_step_mark(ctx);
  const lunai_persistent_mark persistent = lunai_persistent(ctx);
  const size_t peak = ctx->peak;
  size_t need[2], step_peak[2];
  luna_status status;
  lunai_piece *const pieces = ctx->pieces, *piece;
  luna_op *op;
  int i;
  for (piece = pieces; piece; piece = piece->next) piece->next_before = piece->next;
  for (i = 0; i < 2; i++) {
    step_peak[i] = ctx->arena[i].step_peak;
    ctx->arena[i].step_peak = ctx->arena[i].step_bytes;
  }
  ctx->reserved = NULL;
  ctx->reserving = true;
  status = lunai_walk_back(loss);
  ctx->reserving = false;
  for (i = 0; i < 2; i++) {
    need[i] = ctx->arena[i].step_peak - mark.bytes[i];
    ctx->arena[i].step_peak = step_peak[i];
  }
  ctx->peak = peak;                  /* what the second walk takes is counted there */
  lunai_step_rewind(ctx, mark);
  for (ctx->pieces = piece = pieces; piece; piece = piece->next) piece->next = piece->next_before;
  lunai_unwalk(loss);
  for (op = ctx->tape; op; op = op->previous) {
    for (i = 0; i < op->inputs; i++) lunai_unwalk(op->in[i]);
    for (i = 0; i < op->outputs; i++) lunai_unwalk(op->out[i]);
    if (!op->kept_again) continue;
    op->kept = NULL;
    op->kept_piece = NULL;
    op->kept_again = false;
  }
  if (status == LUNA_OK && !(lunai_step_reserve(ctx, false, need[0]) && lunai_step_reserve(ctx, true, need[1])))
    status = lunai_fail_memory(ctx, "luna_backward", need[0] + need[1]);
  if (status == LUNA_OK) return LUNA_OK;
  for (; ctx->reserved; ctx->reserved = ctx->reserved->reserved) {
    ctx->reserved->grad = NULL;
    ctx->reserved->has_grad = false;
  }
  lunai_persistent_rewind(ctx, persistent);
  return status;
}

LUNA_API luna_status luna_backward(luna_tensor *loss) {
  luna_ctx *ctx = loss ? loss->ctx : NULL;
  luna_status status;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (ctx->status != LUNA_OK) return ctx->status;
  if (luna_count(loss) != 1)
    return lunai_fail_status(ctx, LUNA_ERROR_NOT_ONE_ELEMENT, "luna_backward", loss, luna_count(loss));
  if (!ctx->tape || !loss->needs_grad)
    return lunai_fail_status(ctx, LUNA_ERROR_NO_TAPE);
  status = lunai_reserve_backward(loss);
  if (status == LUNA_OK) status = lunai_walk_back(loss);
  if (status != LUNA_OK) return status;
  ctx->tape = NULL;
  ctx->differentiated = true;
  ctx->backwards++;
  return LUNA_OK;
}

#endif /* !LUNA_NO_TRAIN */

/* ---------------------------------------------------------------------------------------------------------------------
   >>graphs
   Between begin and end the context's backend is a graph's own table, which notes calls: each is a record of a copy of
   its arguments, tensors and all, and goes into a hash of everything but the values that are copied to the device. At
   the end the records are run: as they are; or while the device records them, with those copies made from one place
   there; or not at all, where a recording with their hash exists: then that place alone is written. Guarded by
   tests/cuda.c.
   ------------------------------------------------------------------------------------------------------------------ */
typedef enum lunai_call_kind {
  LUNAI_CALL_FORWARD = 0, LUNAI_CALL_BACKWARD, LUNAI_CALL_COPY, LUNAI_CALL_ZERO, LUNAI_CALL_BEGIN, LUNAI_CALL_CHECK,
  LUNAI_CALL_NORM, LUNAI_CALL_UPDATE
} lunai_call_kind;
typedef struct lunai_call {
  lunai_call_kind kind;
  size_t size;                       /* bytes, with the op and the tensors that follow */
  void *to;                          /* copy, zero */
  const void *from;                  /* within the device; null: the value at `value` */
  size_t bytes, value;
  luna_step_state *state;            /* begin, check */
  bool training, stepped;
  luna_rule rule;                    /* norm, update */
  const luna_update *parts, *table;
  int64_t count;
} lunai_call;
typedef struct lunai_bytes { char *at; size_t used, room, needed; } lunai_bytes; /* needed: had there been room */
struct luna_graph {
  luna_ctx *ctx;
  luna_graph *next;
  const luna_backend *device;        /* the real table */
  luna_backend table;
  lunai_bytes calls, values;
  char *inputs;                      /* on the device: the values of a step */
  size_t inputs_size;
  void *recording;
  uint64_t hash, last, recorded;     /* of this step, the one before, the recording */
  bool through;                      /* in this step calls run at once */
  bool customs;                      /* it has noted a custom op, whose state ends with the next begin */
  luna_status status;                /* of what ran before the end */
  const char *reason;
};
LUNA_API const luna_backend *luna_backend_of(const luna_ctx *ctx) {
  return !ctx ? NULL : ctx->graph ? ctx->graph->device : ctx->backend;
}

LUNAI_FN void lunai_graph_mix(luna_graph *g, const void *bytes, size_t size) {
  uint64_t word;
  size_t at;
  for (at = 0; at < size; at += sizeof word) {
    word = 0;
    memcpy(&word, (const char *)bytes + at, size - at < sizeof word ? size - at : sizeof word);
    g->hash = (g->hash ^ word) * 0x9E3779B97F4A7C15u;
    g->hash ^= g->hash >> 29;
  }
}
LUNAI_FN void lunai_graph_mix_number(luna_graph *g, uint64_t value) { lunai_graph_mix(g, &value, sizeof value); }
LUNAI_FN void lunai_graph_mix_pointer(luna_graph *g, const void *value) {
  lunai_graph_mix_number(g, (uint64_t)(uintptr_t)value);
}

/* room for `size` bytes more; null where there is none, or where it would not be used */
LUNAI_FN char *lunai_bytes_take(lunai_bytes *bytes, size_t size, bool wanted) {
  char *at = bytes->at + bytes->used;
  size = (size + 15) / 16 * 16;
  bytes->needed += size;
  if (!wanted || bytes->room - bytes->used < size) return NULL;
  bytes->used += size;
  return at;
}

LUNAI_FN luna_status lunai_call_run(luna_graph *g, lunai_call *c, bool recording) {
  const luna_backend *b = g->device;
  luna_op *op = (luna_op *)(void *)(c + 1);
  switch (c->kind) {
    case LUNAI_CALL_FORWARD: return b->op[op->kind].forward(op);
    case LUNAI_CALL_BACKWARD: return b->op[op->kind].backward(op);
    case LUNAI_CALL_COPY:
      if (c->from) return b->copy(g->ctx, c->to, c->from, c->bytes, 0);
      return recording ? b->copy(g->ctx, c->to, g->inputs + c->value, c->bytes, 0)
                       : b->copy(g->ctx, c->to, g->values.at + c->value, c->bytes, 1);
    case LUNAI_CALL_ZERO: return b->zero(g->ctx, c->to, c->bytes);
    case LUNAI_CALL_BEGIN: return b->begin(g->ctx, c->state, c->training, c->stepped);
    case LUNAI_CALL_CHECK: return b->check(g->ctx, (const luna_tensor *)(const void *)(c + 1), c->state);
    case LUNAI_CALL_NORM: return b->norm(g->ctx, &c->rule, c->parts, c->table, c->count);
    default: return b->update(g->ctx, &c->rule, c->parts, c->table, c->count);
  }
}
LUNAI_FN luna_status lunai_calls_run(luna_graph *g, bool recording) {
  luna_status status = LUNA_OK;
  size_t at;
  for (at = 0; at < g->calls.used && status == LUNA_OK;) {
    lunai_call *c = (lunai_call *)(void *)(g->calls.at + at);
    status = lunai_call_run(g, c, recording);
    at += c->size;
  }
  return status;
}
/* What has been noted runs now, and what follows at once. */
LUNAI_FN void lunai_graph_flush(luna_ctx *ctx, const char *reason) {
  luna_graph *g = ctx->graph;
  if (!g || g->through) return;
  g->through = true;
  g->reason = reason;
  g->status = lunai_calls_run(g, false);
}

/* a record with `more` bytes after it; null: the call is to run at once */
LUNAI_FN lunai_call *lunai_note(luna_graph *g, lunai_call_kind kind, size_t more) {
  const size_t size = (sizeof(lunai_call) + more + 15) / 16 * 16;
  lunai_call *c = (lunai_call *)(void *)lunai_bytes_take(&g->calls, size, !g->through);
  if (!c) {
    lunai_graph_flush(g->ctx, "its first steps run by themselves, until their memory lies still");
    return NULL;
  }
  memset(c, 0, sizeof *c);
  c->kind = kind;
  c->size = size;
  lunai_graph_mix_number(g, (uint64_t)kind);
  return c;
}
LUNAI_FN void lunai_note_tensor(luna_graph *g, luna_tensor *to, const luna_tensor *t) {
  *to = *t;
  lunai_graph_mix_pointer(g, t->data);
  lunai_graph_mix_pointer(g, t->grad);
  lunai_graph_mix(g, t->shape, sizeof t->shape);
  lunai_graph_mix_number(g, (uint64_t)t->rank);
}
LUNAI_FN void lunai_note_arguments(luna_graph *g, const luna_op *op) {
  const uint32_t words[] = { (uint32_t)op->kind, (uint32_t)op->inputs, (uint32_t)op->outputs, op->dropout_op,
                             op->last_dropout_op, (uint32_t)op->activation, (uint32_t)op->training, (uint32_t)op->sets,
                             (uint32_t)op->dots };
  const float drops[] = { op->dropout, op->last_dropout };
  const void *pointers[] = { op->index, op->lengths, op->query_offsets, op->key_offsets, op->mean_ka, op->mean_av,
                             op->position, op->history, op->kept, op->workspace };
  lunai_graph_mix(g, words, sizeof words);
  lunai_graph_mix(g, drops, sizeof drops);
  lunai_graph_mix(g, pointers, sizeof pointers);
  lunai_graph_mix(g, &op->arg, sizeof op->arg);
  lunai_graph_mix(g, &op->custom.forward, sizeof op->custom.forward);
  if (op->custom.state) lunai_graph_mix(g, op->custom.state, op->custom.state_size);
}
/* a copy of an op, with its tensors from `next` on; what is left of them */
LUNAI_FN luna_tensor *lunai_note_one(luna_graph *g, luna_op *to, luna_tensor *next, const luna_op *op) {
  const int tensors = op->inputs + op->outputs;
  int i, j;
  *to = *op;
  lunai_note_arguments(g, op);
  for (i = 0; i < tensors; i++) {
    luna_tensor **at = i < op->inputs ? &to->in[i] : &to->out[i - op->inputs];
    if (!*at) continue;
    for (j = 0; j < i && j < op->inputs && op->in[j] != *at; j++);
    if (j < i && j < op->inputs) *at = to->in[j]; /* one tensor stays one */
    else {
      lunai_note_tensor(g, next, *at);
      *at = next++;
    }
  }
  return next;
}
LUNAI_FN luna_status lunai_note_op(luna_op *op, lunai_call_kind kind) {
  luna_graph *g = op->ctx->graph;
  const luna_op_functions *device = &g->device->op[op->kind];
  const luna_op *loss = op->loss;
  const int ops = loss ? 2 : 1, tensors = op->inputs + op->outputs + (loss ? loss->inputs + loss->outputs : 0);
  lunai_call *c;
  luna_op *to;
  luna_tensor *next;
  if (op->kind == LUNA_OP_CUSTOM && !op->custom.recordable)
    lunai_graph_flush(op->ctx, "a custom op is not recordable (luna_custom)");
  if (op->kind == LUNA_OP_SPARSE_ATTENTION) lunai_graph_flush(op->ctx, "sparse attention has its patterns on the host");
  c = lunai_note(g, kind, (size_t)ops * sizeof(luna_op) + (size_t)tensors * sizeof(luna_tensor));
  if (!c) return kind == LUNAI_CALL_FORWARD ? device->forward(op) : device->backward(op);
  g->customs = g->customs || op->kind == LUNA_OP_CUSTOM;
  to = (luna_op *)(void *)(c + 1);
  next = lunai_note_one(g, to, (luna_tensor *)(void *)(to + ops), op);
  if (!loss) return LUNA_OK;
  to->loss = to + 1;
  lunai_note_one(g, to + 1, next, loss);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_note_forward(luna_op *op) { return lunai_note_op(op, LUNAI_CALL_FORWARD); }
LUNAI_FN luna_status lunai_note_backward(luna_op *op) { return lunai_note_op(op, LUNAI_CALL_BACKWARD); }
LUNAI_FN luna_status lunai_note_copy(luna_ctx *ctx, void *to, const void *from, size_t bytes, int direction) {
  luna_graph *g = ctx->graph;
  char *value = NULL;
  lunai_call *c;
  if (bytes == 0) return LUNA_OK;
  if (direction == 2) lunai_graph_flush(ctx, "something was read before luna_graph_end");
  if (direction == 1) value = lunai_bytes_take(&g->values, bytes, !g->through);
  if (direction == 1 && !value)
    lunai_graph_flush(ctx, "its first steps run by themselves, until their memory lies still");
  c = direction == 2 ? NULL : lunai_note(g, LUNAI_CALL_COPY, 0);
  if (!c) return g->device->copy(ctx, to, from, bytes, direction);
  c->to = to;
  c->bytes = bytes;
  c->from = direction == 0 ? from : NULL;
  c->value = value ? (size_t)(value - g->values.at) : 0;
  if (value) memcpy(value, from, bytes);
  lunai_graph_mix_pointer(g, to);
  lunai_graph_mix_pointer(g, c->from);
  lunai_graph_mix_number(g, bytes);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_note_zero(luna_ctx *ctx, void *at, size_t bytes) {
  lunai_call *c = lunai_note(ctx->graph, LUNAI_CALL_ZERO, 0);
  if (!c) return ctx->graph->device->zero(ctx, at, bytes);
  c->to = at;
  c->bytes = bytes;
  lunai_graph_mix_pointer(ctx->graph, at);
  lunai_graph_mix_number(ctx->graph, bytes);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_note_begin(luna_ctx *ctx, luna_step_state *state, bool training, bool stepped) {
  lunai_call *c;
  if (ctx->graph->customs) lunai_graph_flush(ctx, "a step with a custom op was not its last");
  c = lunai_note(ctx->graph, LUNAI_CALL_BEGIN, 0);
  if (!c) return ctx->graph->device->begin(ctx, state, training, stepped);
  c->state = state;
  c->training = training;
  c->stepped = stepped;
  lunai_graph_mix_number(ctx->graph, (uint64_t)training << 1 | (uint64_t)stepped);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_note_check(luna_ctx *ctx, const luna_tensor *loss, luna_step_state *state) {
  lunai_call *c = lunai_note(ctx->graph, LUNAI_CALL_CHECK, sizeof *loss);
  if (!c) return ctx->graph->device->check(ctx, loss, state);
  c->state = state;
  lunai_note_tensor(ctx->graph, (luna_tensor *)(void *)(c + 1), loss);
  return LUNA_OK;
}
/* the parts stay as they are, the optimiser's, until it makes another step */
LUNAI_FN lunai_call *lunai_note_parts(luna_ctx *ctx, lunai_call_kind kind, const luna_rule *rule,
                                      const luna_update *parts,
                                      const luna_update *table, int64_t count) {
  lunai_call *c = lunai_note(ctx->graph, kind, 0);
  if (!c) return NULL;
  c->rule = *rule;
  c->parts = parts;
  c->table = table;
  c->count = count;
  lunai_graph_mix(ctx->graph, rule, sizeof *rule);
  lunai_graph_mix(ctx->graph, parts, (size_t)count * sizeof *parts);
  lunai_graph_mix_pointer(ctx->graph, table);
  return c;
}
LUNAI_FN luna_status lunai_note_norm(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                     const luna_update *table, int64_t count) {
  if (lunai_note_parts(ctx, LUNAI_CALL_NORM, rule, parts, table, count)) return LUNA_OK;
  return ctx->graph->device->norm(ctx, rule, parts, table, count);
}
LUNAI_FN luna_status lunai_note_update(luna_ctx *ctx, const luna_rule *rule, const luna_update *parts,
                                       const luna_update *table, int64_t count) {
  if (lunai_note_parts(ctx, LUNAI_CALL_UPDATE, rule, parts, table, count)) return LUNA_OK;
  return ctx->graph->device->update(ctx, rule, parts, table, count);
}

LUNAI_FN bool lunai_has_graphs(const luna_ctx *ctx) {
  return ctx && ctx->open_status == LUNA_OK && lunai_on_device(ctx) && luna_backend_of(ctx)->record;
}
/* null: no memory */
LUNAI_FN luna_graph *lunai_graph_make(luna_ctx *ctx) {
  luna_graph *g = (luna_graph *)lunai_raw_allocate(&ctx->options.allocator, sizeof *g);
  int i;
  if (!g) return NULL;
  memset(g, 0, sizeof *g);
  g->ctx = ctx;
  g->device = luna_backend_of(ctx);
  g->table = *g->device;
  g->table.copy = lunai_note_copy;
  g->table.zero = lunai_note_zero;
  g->table.begin = lunai_note_begin;
  g->table.check = lunai_note_check;
  g->table.norm = lunai_note_norm;
  g->table.update = lunai_note_update;
  for (i = 0; i < LUNA_OP_COUNT; i++) {
    if (g->table.op[i].forward) g->table.op[i].forward = lunai_note_forward;
    if (g->table.op[i].backward) g->table.op[i].backward = lunai_note_backward;
  }
  g->reason = "no step has ended";
  g->next = ctx->graphs;
  return ctx->graphs = g;
}
LUNA_API luna_graph *luna_graph_open(luna_ctx *ctx) {
  luna_graph *g = lunai_has_graphs(ctx) ? lunai_graph_make(ctx) : NULL;
  if (!g && lunai_has_graphs(ctx)) lunai_fail_memory(ctx, "luna_graph_open", sizeof *g);
  return g;
}
LUNAI_FN void lunai_bytes_free(const luna_graph *g, lunai_bytes *bytes) {
  if (bytes->at) lunai_raw_release(&g->ctx->options.allocator, bytes->at, bytes->room);
  memset(bytes, 0, sizeof *bytes);
}
LUNA_API void luna_graph_close(luna_graph *g) {
  luna_graph **at;
  luna_ctx *ctx;
  if (!g) return;
  ctx = g->ctx;
  if (ctx->graph == g) {
    ctx->graph = NULL;
    ctx->backend = g->device;
  }
  for (at = &ctx->graphs; *at != g; at = &(*at)->next);
  *at = g->next;
  if (g->recording) g->device->forget(ctx->self, g->recording);
  if (g->inputs) g->device->release(ctx->self, g->inputs, g->inputs_size);
  lunai_bytes_free(g, &g->calls);
  lunai_bytes_free(g, &g->values);
  lunai_raw_release(&ctx->options.allocator, g, sizeof *g);
}

LUNA_API luna_status luna_graph_begin(luna_graph *g) {
  luna_ctx *ctx = g ? g->ctx : NULL;
  if (!g) return LUNA_OK;
  if (ctx->graph) return lunai_fail_status(ctx, LUNA_ERROR_GRAPH_ORDER, "luna_graph_begin");
  g->calls.used = g->calls.needed = g->values.used = g->values.needed = 0;
  g->hash = 0;
  g->through = g->customs = false;
  g->status = LUNA_OK;
  ctx->graph = g;
  ctx->backend = &g->table;
  return LUNA_OK;
}
/* as large as a step needs; nothing is lost where memory ends */
LUNAI_FN void lunai_bytes_grow(const luna_graph *g, lunai_bytes *bytes) {
  const size_t needed = bytes->needed;
  if (needed <= bytes->room) return;
  lunai_bytes_free(g, bytes);
  bytes->at = (char *)lunai_raw_allocate(&g->ctx->options.allocator, needed);
  if (bytes->at) bytes->room = needed;
}
/* Has the device record what was noted; false: it could not, and has run nothing */
LUNAI_FN bool lunai_graph_record(luna_graph *g) {
  luna_ctx *ctx = g->ctx;
  const luna_backend *b = g->device;
  const luna_status before = ctx->status;
  luna_status status;
  if (g->recording) b->forget(ctx->self, g->recording);
  g->recording = NULL;
  if (g->values.used > g->inputs_size) {
    if (g->inputs) b->release(ctx->self, g->inputs, g->inputs_size);
    g->inputs = (char *)b->allocate(ctx->self, g->values.used);
    g->inputs_size = g->inputs ? g->values.used : 0;
    if (!g->inputs) return false;
  }
  if (b->record(ctx) != LUNA_OK) return ctx->status = before, false;
  status = lunai_calls_run(g, true);
  if (b->recorded(ctx, status == LUNA_OK ? &g->recording : NULL) != LUNA_OK || !g->recording) {
    ctx->status = before;
    return false;
  }
  g->recorded = g->hash;
  return true;
}
LUNAI_FN luna_status lunai_graph_launch(luna_graph *g) {
  luna_status status = LUNA_OK;
  g->reason = "";
  if (g->values.used) status = g->device->copy(g->ctx, g->inputs, g->values.at, g->values.used, 1);
  return status == LUNA_OK ? g->device->run(g->ctx, g->recording) : status;
}
LUNA_API luna_status luna_graph_end(luna_graph *g) {
  luna_ctx *ctx = g ? g->ctx : NULL;
  luna_status status;
  if (!g) return LUNA_OK;
  if (ctx->graph != g) return lunai_fail_status(ctx, LUNA_ERROR_GRAPH_ORDER, "luna_graph_end");
  ctx->graph = NULL;
  ctx->backend = g->device;
  status = g->status;
  if (!g->through && ctx->status == LUNA_OK && g->recording && g->hash == g->recorded) status = lunai_graph_launch(g);
  else if (!g->through && ctx->status == LUNA_OK && g->hash == g->last && lunai_graph_record(g))
    status = lunai_graph_launch(g);
  else if (!g->through) {
    g->reason = g->hash != g->last ? "it differs from the step before" : "the device could not record it";
    status = lunai_calls_run(g, false);
  }
  g->last = g->through ? 0 : g->hash;
  lunai_bytes_grow(g, &g->calls);
  lunai_bytes_grow(g, &g->values);
  if (status == LUNA_OK && ctx->status != LUNA_OK) return ctx->status;
  return lunai_backend_result(ctx, "luna_graph_end", status);
}
LUNA_API const char *luna_graph_reason(const luna_graph *g) {
  return g ? g->reason : "there is no graph: on the CPU, and on a device that records none, calls run one by one";
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>params: named tensors, their first values, and text pairs. Guarded by tests/trainer.c and tests/checkpoints.c.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNAI_MAX_PARAM_NAME 1024       /* with its end */
typedef struct lunai_param {
  struct lunai_param *next;          /* in the set */
  struct lunai_param *previous, *jump; /* the one before, and one further back: any is log n jumps from the last */
  struct lunai_param *child[4];      /* later ones, by the next two bits of their hash: a tree to look names up in */
  int64_t index;
  const char *name;
  uint64_t hash;
  luna_tensor tensor;
  float *frozen_grad;                /* the tensor's gradient and has_grad while it is frozen */
  bool had_grad;
} lunai_param;
typedef struct lunai_meta { struct lunai_meta *next; const char *key, *value; } lunai_meta;

struct luna_params {
  luna_ctx *ctx;
  int64_t number;                    /* of the context's sets */
  lunai_param *first, *last;
  lunai_meta *metas, *last_meta;
  lunai_meta *replaced;              /* earlier values of pairs, newest first */
  lunai_param *root;                 /* of the tree of names */
  int64_t size;
  bool borrowing;                    /* values are read in place: */
  const luna_params *shared;         /* from this set, */
  lunai_sharing sharing;             /* which ctx->sharing lists where work is queued; */
  lunai_st source;                   /* or from this file */
  /* while a model is loaded: new parameters must be in this file, and take their values from it */
  const lunai_st *filling;
};

/* Records the outcome of a call that makes something. The first failure is remembered until the same call succeeds,
   in that set or in one opened since; failures inside an init are the init's. */
LUNAI_FN void lunai_remember(luna_ctx *ctx, const luna_params *set, uint64_t hash, luna_status status) {
  lunai_failure *f = &ctx->failure;
  const bool same = f->hash == hash && (f->set == set || (set && set->number >= f->sets));
  if (ctx->setups > 0 || (status == LUNA_OK ? !same : f->status != LUNA_OK && !same)) return;
  f->set = set;
  f->hash = hash;
  f->sets = ctx->sets;
  f->status = status;
  f->id = status == LUNA_OK ? LUNA_ERROR_NONE : ctx->error_id;
  memcpy(f->error, ctx->error, sizeof f->error);
  if (status == LUNA_OK) f->error[0] = 0;
}

LUNAI_FN bool lunai_is_ours(const char *name) { return strncmp(name, "luna.", 5) == 0; }
LUNAI_FN char *lunai_persist_text(luna_ctx *ctx, const char *a, const char *b) {
  const size_t na = strlen(a), nb = strlen(b);
  void *memory;
  if (!lunai_persist(ctx, na + nb + 1, false, &memory)) return NULL;
  memcpy(memory, a, na);
  memcpy((char *)memory + na, b, nb + 1);
  return (char *)memory;
}

/* UTF-8, as names and pairs must be to go into a checkpoint */
LUNAI_FN bool lunai_is_text(const char *s) {
  const char *end = s + strlen(s);
  while (s < end) if (lunai_st_utf8(&s, end) == LUNAI_ST_BAD) return false;
  return true;
}

LUNA_API luna_params *luna_params_open(luna_ctx *ctx) {
  void *memory;
  if (!ctx) return NULL;
  if (!lunai_persist(ctx, sizeof(luna_params), false, &memory)) {
    lunai_remember(ctx, NULL, 0, lunai_fail_memory(ctx, "luna_params_open", sizeof(luna_params)));
    return NULL;
  }
  lunai_remember(ctx, NULL, 0, LUNA_OK);
  ((luna_params *)memory)->ctx = ctx;
  ((luna_params *)memory)->number = ctx->sets++;
  return (luna_params *)memory;
}

LUNA_API luna_params *luna_params_share(luna_ctx *ctx, const luna_params *from) {
  luna_params *params = from ? luna_params_open(ctx) : NULL;
  const luna_params *root = from;
  if (ctx && !from)
    lunai_remember(ctx, NULL, 0, lunai_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_params_share", "from"));
  if (!params) return NULL;
  params->borrowing = true;
  params->shared = from;
  while (root->shared) root = root->shared;
  if (root->ctx == ctx || luna_backend_of(ctx) != luna_backend_of(root->ctx) || !lunai_queues(ctx) ||
      !lunai_queues(root->ctx))
    return params;
  params->sharing.owner = root->ctx;
  params->sharing.next = ctx->sharing;
  ctx->sharing = &params->sharing;
  return lunai_backend_result(ctx, "luna_params_share", lunai_wait_for_owners(ctx)) == LUNA_OK ? params : NULL;
}

/* where in the tree a parameter of this name is or belongs; of those before index `before` */
LUNAI_FN lunai_param **lunai_param_place(luna_params *params, const char *name, uint64_t hash, int64_t before) {
  lunai_param **at = &params->root;
  uint64_t bits = hash;
  for (; *at && (*at)->index < before && ((*at)->hash != hash || strcmp((*at)->name, name) != 0); bits >>= 2)
    at = &(*at)->child[bits & 3];
  return at;
}
LUNAI_FN lunai_param *lunai_param_find(const luna_params *params, const char *name) {
  return params ? *lunai_param_place((luna_params *)(uintptr_t)params, name, lunai_hash(name), INT64_MAX) : NULL;
}
LUNA_API luna_tensor *luna_params_find(const luna_params *params, const char *name) {
  lunai_param *p = name ? lunai_param_find(params, name) : NULL;
  return p ? &p->tensor : NULL;
}
LUNA_API luna_ctx *luna_params_ctx(const luna_params *params) { return params ? params->ctx : NULL; }
LUNA_API int64_t luna_params_tensor_count(const luna_params *params) { return params ? params->size : 0; }
LUNA_API luna_tensor *luna_params_at(const luna_params *params, int64_t index, const char **name) {
  lunai_param *p = params && index >= 0 && index < params->size ? params->last : NULL;
  while (p && p->index > index) p = p->jump->index >= index ? p->jump : p->previous;
  if (p && name) *name = p->name;
  return p ? &p->tensor : NULL;
}
LUNA_API int64_t luna_params_element_count(const luna_params *params) {
  int64_t count = 0;
  lunai_param *p;
  for (p = params ? params->first : NULL; p; p = p->next) count += luna_count(&p->tensor);
  return count;
}
LUNA_API luna_status luna_params_zero_grad(luna_params *params) {
  lunai_param *p;
  luna_status status;
  if (!params) return LUNA_BAD_ARGUMENT;
  if (params->ctx->open_status != LUNA_OK) return params->ctx->open_status;
  /* nonfinite came from the loss of these gradients */
  status = params->ctx->options.measure ? LUNA_OK
      : params->ctx->backend->begin(params->ctx, params->ctx->state, false, true);
  for (p = params->first; p && status == LUNA_OK; p = p->next)
    if (p->tensor.grad)
      status = params->ctx->backend->zero(params->ctx, p->tensor.grad, (size_t)luna_count(&p->tensor) * sizeof(float));
  return status;
}

LUNA_API luna_status luna_params_freeze(luna_params *params, const char *name, bool frozen) {
  luna_ctx *ctx = params ? params->ctx : NULL;
  lunai_param *p;
  int64_t matched = 0;
  luna_status status = LUNA_OK;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (params->borrowing) return lunai_fail_status(ctx, LUNA_ERROR_SET_BORROWED, "luna_params_freeze");
  for (p = params->first; p && status == LUNA_OK; p = p->next) {
    luna_tensor *t = &p->tensor;
    if (name && !strstr(p->name, name)) continue;
    matched++;
    if (t->needs_grad != frozen) continue;
    if (frozen && t->grad) status = lunai_backend_result(ctx, "luna_params_freeze", ctx->backend->zero(ctx, t->grad,
        (size_t)luna_count(t) * sizeof(float)));
    if (status != LUNA_OK) continue;
    t->needs_grad = !frozen;
    if (frozen) {
      p->frozen_grad = t->grad;
      p->had_grad = t->has_grad;
    }
    t->grad = frozen ? NULL : p->frozen_grad;
    t->has_grad = !frozen && p->had_grad;
  }
  return status == LUNA_OK && !matched ? lunai_fail_status(ctx, LUNA_ERROR_FREEZE_EMPTY, name ? name : "") : status;
}

/* --- first values: word w of element e out of Philox(counter (e, hash of the name), key = seed), the same on every
   machine --- */
LUNAI_FN float lunai_unit(uint32_t word) { return ((float)(word >> 8) + 0.5f) * (1.0f / 16777216.0f); } /* (0, 1) */
LUNAI_FN float lunai_normal(uint32_t counter[4], uint64_t seed) {      /* Marsaglia's polar method: a log, no sine */
  for (;; counter[1] += 0x10000u) {
    uint32_t word[4];
    int i;
    lunai_philox(counter, seed, word);
    for (i = 0; i < 4; i += 2) {
      const float u = 2 * lunai_unit(word[i]) - 1, v = 2 * lunai_unit(word[i + 1]) - 1, s = u * u + v * v;
      if (s > 0 && s < 1) return u * (float)sqrt((double)(-2 * lunai_log1_scalar(s) / s));
    }
  }
}
LUNAI_FN void lunai_first_values(float *out, int64_t first, int64_t count, luna_init init, float bound, int64_t width,
                                 uint64_t hash, uint64_t seed) {
  int64_t i;
  for (i = 0; i < count; i++) {
    uint32_t counter[4], word[4];
    counter[0] = (uint32_t)(first + i);
    counter[1] = (uint32_t)((uint64_t)(first + i) >> 32);
    counter[2] = (uint32_t)hash;
    counter[3] = (uint32_t)(hash >> 32);
    if (init.kind == LUNA_INIT_ZEROS || init.kind == LUNA_INIT_ONES)
      out[i] = init.kind == LUNA_INIT_ONES ? bound : 0.0f;
    else if (init.kind == LUNA_INIT_NORMAL) out[i] = bound * lunai_normal(counter, seed);
    else {
      lunai_philox(counter, seed, word);
      out[i] = bound * (2 * lunai_unit(word[0]) - 1);
      if (init.kind == LUNA_INIT_IDENTITY && (first + i + 1) % width == 0) out[i] += 1.0f;
    }
  }
}
LUNAI_FN luna_status lunai_param_fill(luna_ctx *ctx, lunai_param *p, luna_init init) {
  const int64_t count = luna_count(&p->tensor);
  float block[1024], bound = init.scale == 0 ? 1.0f : init.scale;
  int64_t at;
  luna_status status = LUNA_OK;
  if (init.kind == LUNA_INIT_XAVIER) {
    const int64_t in = p->tensor.rank > 1 ? count / lunai_max(1, p->tensor.shape[0]) : count, out = p->tensor.shape[0];
    bound *= (float)sqrt(6.0 / (double)lunai_max(1, in + out));
  }
  for (at = 0; at < count && status == LUNA_OK && !ctx->options.measure; at += 1024) {
    const int64_t n = lunai_min(1024, count - at);
    lunai_first_values(block, at, n, init, bound, lunai_last(&p->tensor), p->hash, ctx->options.seed);
    status = ctx->backend->copy(ctx, p->tensor.data + at, block, (size_t)n * sizeof(float), 1);
  }
  return status;
}

/* the address of a borrowed parameter's values; null, and *wrong says why */
LUNAI_FN const float *lunai_borrowed(const luna_params *params, const char *name, const luna_tensor *like,
                                     const lunai_st *st, luna_error_id *wrong) {
  lunai_param *other = params->shared ? lunai_param_find(params->shared, name) : NULL;
  lunai_st_tensor t;
  int a, rank = other ? other->tensor.rank : 0;
  *wrong = LUNA_ERROR_NONE;
  if (params->shared && luna_backend_of(params->shared->ctx) != luna_backend_of(params->ctx))
    *wrong = LUNA_ERROR_BORROW_DEVICE;
  if (!params->shared && lunai_on_device(params->ctx)) *wrong = LUNA_ERROR_BORROW_ON_DEVICE;
  if (*wrong) return NULL;
  memset(&t, 0, sizeof t);
  if (params->shared ? !other : !lunai_st_find(st, name, &t)) *wrong = LUNA_ERROR_BORROW_MISSING;
  if (*wrong) return NULL;
  if (!other) rank = t.rank;
  if (rank != like->rank) *wrong = LUNA_ERROR_BORROW_SHAPE;
  for (a = 0; a < rank && !*wrong; a++)
    if ((other ? other->tensor.shape[a] : t.shape[a]) != like->shape[a]) *wrong = LUNA_ERROR_BORROW_SHAPE;
  if (*wrong) return NULL;
  if (other) return other->tensor.data;
  if (!lunai_st_borrow(&t)) *wrong = LUNA_ERROR_BORROW_FORMAT;
  return lunai_st_borrow(&t);
}
LUNAI_FN void lunai_borrow(lunai_param *p, const float *values) {
  p->tensor.data = (float *)(uintptr_t)values;
  p->tensor.needs_grad = false;
  p->tensor.borrowed = true;
}

/* a tensor of a file into a parameter or a moment */
LUNAI_FN luna_status lunai_fill(luna_ctx *ctx, float *data, const lunai_st_tensor *t) {
  const int64_t size = (int64_t)lunai_st_formats[t->dtype].size;
  luna_status status = LUNA_OK;
  float block[1024];
  int64_t at;
  if (!lunai_on_device(ctx)) lunai_st_floats(t, data);
  else if (lunai_st_borrow(t)) status = ctx->backend->copy(ctx, data, t->data, t->bytes, 1);
  else for (at = 0; at < t->count && status == LUNA_OK; at += 1024) {
    lunai_st_tensor part = *t;
    part.data += at * size;
    part.count = lunai_min(1024, t->count - at);
    part.bytes = (size_t)(part.count * size);
    lunai_st_floats(&part, block);
    status = ctx->backend->copy(ctx, data + at, block, (size_t)part.count * sizeof(float), 1);
  }
  return lunai_backend_result(ctx, "a parameter's values", status);
}

LUNAI_FN bool lunai_st_is_real(const lunai_st_tensor *t) {
  return t->dtype == LUNAI_ST_F32 || t->dtype == LUNAI_ST_F16 || t->dtype == LUNAI_ST_BF16 || t->dtype == LUNAI_ST_F64;
}
LUNAI_FN bool lunai_st_like(const lunai_st_tensor *t, const luna_tensor *tensor) {
  int a;
  if (t->rank != tensor->rank) return false;
  for (a = 0; a < t->rank; a++) if (t->shape[a] != tensor->shape[a]) return false;
  return true;
}

/* whether the file has a tensor of that name and shape, in numbers that can be read */
LUNAI_FN bool lunai_fills(const lunai_st *st, luna_ctx *ctx, const char *name, int rank, const int64_t *shape,
                          lunai_st_tensor *t) {
  luna_tensor like;
  lunai_tensor_set(&like, ctx, rank, shape);
  if (lunai_st_find(st, name, t) && lunai_st_like(t, &like) && lunai_st_is_real(t)) return true;
  lunai_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_MISSING, ctx->call, lunai_file_name(ctx), name, &like);
  return false;
}

LUNAI_FN void lunai_param_join(luna_params *params, lunai_param *p) {
  lunai_param *last = params->last, *jump = last ? last->jump : p;
  p->index = params->size++;
  p->previous = last;
  /* skew-binary (Myers 1983): two jumps of one length become one of twice that */
  p->jump = !last ? p : last->index - jump->index == jump->index - jump->jump->index ? jump->jump : last;
  if (last) last->next = p;
  else params->first = p;
  params->last = p;
  *lunai_param_place(params, p->name, p->hash, INT64_MAX) = p;
}

/* whether a parameter may be made by that name */
LUNAI_FN bool lunai_param_named(const luna_params *params, const char *name) {
  luna_ctx *ctx = params->ctx;
  const size_t size = name ? strlen(name) : 0;
  if (!lunai_is_given(ctx, "luna_param", "name", name != NULL)) return false;
  if (!lunai_is_text(name)) lunai_fail_status(ctx, LUNA_ERROR_NOT_UTF8, "luna_param", "the name");
  else if (size >= LUNAI_MAX_PARAM_NAME)
    lunai_fail_status(ctx, LUNA_ERROR_NAME_LENGTH, "luna_param", (int64_t)size, (int64_t)LUNAI_MAX_PARAM_NAME - 1,
                      name, "");
  else if (lunai_is_ours(name) || strcmp(name, "__metadata__") == 0)
    lunai_fail_status(ctx, LUNA_ERROR_NAME_RESERVED, "luna_param", name);
  else if (lunai_param_find(params, name)) lunai_fail_status(ctx, LUNA_ERROR_PARAM_EXISTS, name);
  else return true;
  return false;
}
LUNAI_FN luna_tensor *lunai_param_make(luna_params *params, const char *name, int rank, const int64_t *shape,
                                       luna_init init) {
  luna_ctx *ctx = params->ctx;
  const int64_t count = lunai_shape_count(rank, shape);
  lunai_persistent_mark mark;
  lunai_param *p;
  lunai_st_tensor stored;
  void *memory, *data = NULL;
  luna_status status = LUNA_OK;
  luna_error_id wrong = LUNA_ERROR_NONE;
  if (count < 0) {
    const luna_tensor like = lunai_like(ctx, rank, shape);
    lunai_fail_status(ctx, LUNA_ERROR_SHAPE, "luna_param", name ? name : "the shape", &like, (int64_t)rank,
                      LUNAI_MAX_COUNT);
    return NULL;
  }
  if (!lunai_param_named(params, name) || !lunai_in(ctx, name, "init.kind", (int64_t)init.kind, 0, LUNA_INIT_IDENTITY))
    return NULL;
  if (!lunai_is_finite(init.scale)) {
    lunai_fail_status(ctx, LUNA_ERROR_NOT_FINITE_ARGUMENT, name, "init.scale", (double)init.scale);
    return NULL;
  }
  if (params->filling && !lunai_fills(params->filling, ctx, name, rank, shape, &stored)) return NULL;
  mark = lunai_persistent(ctx);
  p = lunai_persist(ctx, sizeof(lunai_param), false, &memory) ? (lunai_param *)memory : NULL;
  if (p) p->name = lunai_persist_text(ctx, name, "");
  if (!p || !p->name || (!params->borrowing && !lunai_persist(ctx, (size_t)count * sizeof(float), true, &data))) {
    lunai_persistent_rewind(ctx, mark);
    lunai_fail_memory(ctx, "luna_param", (size_t)count * sizeof(float));
    return NULL;
  }
  p->hash = lunai_hash(name);
  lunai_tensor_set(&p->tensor, ctx, rank, shape);
  p->tensor.parameter = true;
  p->tensor.needs_grad = true;
  p->tensor.data = (float *)data;
  if (params->borrowing) lunai_borrow(p, lunai_borrowed(params, name, &p->tensor, &params->source, &wrong));
  else if (!params->filling) status = lunai_backend_result(ctx, "luna_param", lunai_param_fill(ctx, p, init));
  else if (!ctx->options.measure) status = lunai_fill(ctx, p->tensor.data, &stored);
  if (wrong) status = lunai_fail_status(ctx, (int)wrong, "luna_param", p->name, &p->tensor);
  if (status != LUNA_OK) {
    lunai_persistent_rewind(ctx, mark);
    return NULL;
  }
  lunai_param_join(params, p);
  return &p->tensor;
}
LUNA_API luna_tensor *luna_param(luna_params *params, const char *name, int rank, const int64_t *shape,
                                 luna_init init) {
  luna_tensor *t = params ? lunai_param_make(params, name, rank, shape, init) : NULL;
  if (params) lunai_remember(params->ctx, params, lunai_hash(name ? name : ""), t ? LUNA_OK : params->ctx->last_status);
  return t;
}

/* --- an init: all of its parameters, or none and its struct zeroed. Inits nest; the outermost is remembered. --- */
typedef struct lunai_setup {
  luna_params *params;
  void *made;                        /* the struct */
  size_t size;
  uint64_t prefix;                   /* its hash */
  const char *outer;                 /* for lunai_leave */
  lunai_persistent_mark memory;
  lunai_param *last;
  lunai_meta *last_meta, *replaced;
  int64_t count;
} lunai_setup;
/* Begins an init; false, with a sentence where there is a context, when it cannot succeed. lunai_setup_end must
   follow either way. */
LUNAI_FN bool lunai_setup_begin(lunai_setup *s, const char *name, luna_params *params, const char *prefix, void *made,
                                size_t size) {
  memset(s, 0, sizeof *s);
  s->params = params;
  s->made = made;
  s->size = size;
  if (!params) return false;
  s->prefix = lunai_hash(prefix ? prefix : "");
  s->memory = lunai_persistent(params->ctx);
  s->last = params->last;
  s->last_meta = params->last_meta;
  s->replaced = params->replaced;
  s->count = params->size;
  params->ctx->setups++;
  s->outer = lunai_enter(params->ctx, name);
  params->ctx->last_status = params->ctx->open_status;
  if (params->ctx->open_status != LUNA_OK) return false;
  return lunai_is_given(params->ctx, name, "the layer or model", made != NULL);
}
LUNAI_FN lunai_meta *lunai_meta_find(const luna_params *params, const char *key);
LUNAI_FN void lunai_setup_undo(const lunai_setup *s) {
  luna_params *params = s->params;
  lunai_param *p;
  for (; params->replaced != s->replaced; params->replaced = params->replaced->next)
    lunai_meta_find(params, params->replaced->key)->value = params->replaced->value;
  for (p = s->last ? s->last->next : params->first; p; p = p->next)
    *lunai_param_place(params, p->name, p->hash, s->count) = NULL;
  params->last = s->last;
  params->last_meta = s->last_meta;
  params->size = s->count;
  if (s->last) s->last->next = NULL;
  else params->first = NULL;
  if (s->last_meta) s->last_meta->next = NULL;
  else params->metas = NULL;
  lunai_persistent_rewind(params->ctx, s->memory);
}
LUNAI_FN luna_status lunai_setup_end(const lunai_setup *s, bool good) {
  luna_ctx *ctx = s->params ? s->params->ctx : NULL;
  luna_status status = LUNA_OK;
  if (!good && s->made) memset(s->made, 0, s->size);
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (!good) {
    lunai_setup_undo(s);
    status = ctx->last_status == LUNA_OK ? LUNA_OUT_OF_MEMORY : ctx->last_status;
  }
  ctx->setups--;
  lunai_leave(ctx, s->outer);
  lunai_remember(ctx, s->params, s->prefix, status);
  return status;
}
/* the context of a set, or null */
LUNAI_FN luna_ctx *lunai_ctx_of(const luna_params *params) { return params ? params->ctx : NULL; }

/* --- text pairs --- */
LUNAI_FN lunai_meta *lunai_meta_find(const luna_params *params, const char *key) {
  lunai_meta *m;
  for (m = params ? params->metas : NULL; m; m = m->next) if (strcmp(m->key, key) == 0) return m;
  return NULL;
}
LUNA_API const char *luna_params_get(const luna_params *params, const char *key) {
  lunai_meta *m = key ? lunai_meta_find(params, key) : NULL;
  return m ? m->value : NULL;
}
/* takes a pair, in persistent memory, into the set; of the same key the newer value counts */
LUNAI_FN void lunai_meta_put(luna_params *params, lunai_meta *pair) {
  lunai_meta *m = lunai_meta_find(params, pair->key);
  if (m) {
    const char *value = m->value;
    m->value = pair->value;
    pair->value = value;
    pair->next = params->replaced;
    params->replaced = pair;
    return;
  }
  pair->next = NULL;
  if (params->last_meta) params->last_meta->next = pair;
  else params->metas = pair;
  params->last_meta = pair;
}
LUNAI_FN luna_status lunai_params_put(luna_params *params, const char *key, const char *value) {
  lunai_persistent_mark mark;
  lunai_meta *pair;
  void *memory;
  if (!lunai_is_text(key) || !lunai_is_text(value))
    return lunai_fail_status(params->ctx, LUNA_ERROR_NOT_UTF8, "luna_params_set", lunai_is_text(key) ? "value" : "key");
  mark = lunai_persistent(params->ctx);
  pair = lunai_persist(params->ctx, sizeof(lunai_meta), false, &memory) ? (lunai_meta *)memory : NULL;
  if (pair) pair->key = lunai_persist_text(params->ctx, key, "");
  if (pair && pair->key) pair->value = lunai_persist_text(params->ctx, value, "");
  if (!pair || !pair->value) {
    lunai_persistent_rewind(params->ctx, mark);
    return lunai_fail_memory(params->ctx, "luna_params_set", strlen(key) + strlen(value));
  }
  lunai_meta_put(params, pair);
  return LUNA_OK;
}
LUNA_API luna_status luna_params_set(luna_params *params, const char *key, const char *value) {
  if (!params) return LUNA_BAD_ARGUMENT;
  if (!key || !value)
    return lunai_fail_status(params->ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_params_set", key ? "value" : "key");
  if (lunai_is_ours(key)) return lunai_fail_status(params->ctx, LUNA_ERROR_NAME_RESERVED, "luna_params_set", key);
  return lunai_params_put(params, key, value);
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>ops: shape checks, then a call of the backend
   ------------------------------------------------------------------------------------------------------------------ */
/* of a stream or its layer: memories, and whether each is of a source, as in a decoder */
#ifdef LUNA_ONLY_STREAM
#define LUNAI_SOURCES(s) ((int64_t)1)
#define LUNAI_CROSS(s) false
#else
#define LUNAI_SOURCES(s) ((s)->sources)
#define LUNAI_CROSS(s) ((s)->cross)
#endif
/* What a layer of a stream has beside its rows, in backend memory: of the tokens before them, which ops that look back
   read and update, and what its parameters and its sources alone make, which is computed once. */
typedef struct lunai_past {
  const int64_t *position;           /* tokens before */
  double *mean_ka, *mean_av;         /* [batch, heads, head_dim, slots], [batch, heads, slots, head_dim] */
  float *history;                    /* [batch, convolution - 1, dim] */
  /* memories: one for all sequences, or a decoder's, each for batch / sources sequences */
  int64_t sources;
  luna_tensor scores;                /* folded [sources, heads slots, dim], else scaled queries [sources, heads, slots,
                                        head_dim]; of one source without its axis */
  luna_tensor scores_bias;           /* rank 0: not folded; [heads slots], of several sources [sources, batch / sources,
                                        heads slots] */
  luna_tensor keys, values;          /* a decoder's, of the packed context: [sources, slots, dim] */
  const int32_t *slots, *source_slots; /* a decoder's real memory slots: [batch], [sources] */
} lunai_past;

/* whether the shapes of what comes in are known to fit: a stream's were checked when it was opened */
LUNAI_FN bool lunai_is_checked(const luna_ctx *ctx) { return LUNAI_BUMPS(ctx); }

/* --- shapes --- */
LUNAI_FN luna_tensor *lunai_view(lunai_build *s, luna_tensor *x, int rank, const int64_t *shape, int64_t offset) {
  void *memory;
  luna_tensor *t;
  if (!lunai_step_small(x->ctx, sizeof(luna_tensor), &memory)) return lunai_op_no_memory(s, sizeof(luna_tensor));
  t = (luna_tensor *)memory;
  lunai_tensor_set(t, x->ctx, rank, shape);
  t->base = x->base ? x->base : x;
  t->offset = x->offset + offset;
  t->data = x->data ? x->data + offset : NULL;
  t->needs_grad = x->needs_grad;
  return t;
}

LUNA_API luna_tensor *luna_reshape(luna_tensor *x, int rank, const int64_t *shape) {
  int64_t full[LUNA_MAX_RANK], known = 1;
  int a, open = -1;
  lunai_build s;
  luna_tensor asked;
  if (!lunai_start(&s, LUNA_OP_COUNT, "luna_reshape", 1, x, NULL, NULL)) return NULL;
  if (rank < 0 || rank > LUNA_MAX_RANK || (rank && !shape))
    return lunai_fail_shape(x->ctx, "luna_reshape", rank, shape);
  for (a = 0; a < rank; a++) {
    full[a] = shape[a];
    if (shape[a] == -1 && open < 0) open = a;
    else known = lunai_checked(known, shape[a]);
  }
  if (open >= 0 && known > 0) full[open] = luna_count(x) / known;
  lunai_tensor_set(&asked, x->ctx, rank, rank ? full : shape);
  if (lunai_shape_count(rank, full) != luna_count(x))
    return lunai_fail(x->ctx, LUNA_ERROR_RESHAPE, x, luna_count(x), &asked);
  return lunai_view(&s, x, rank, full, 0);
}

LUNA_API luna_tensor *luna_detach(luna_tensor *x) {
  lunai_build s;
  luna_tensor *t = lunai_start(&s, LUNA_OP_COUNT, "luna_detach", 1, x, NULL, NULL) ?
      lunai_view(&s, x, x->rank, x->shape, 0) : NULL;
  if (t) t->needs_grad = false;
  return t;
}

LUNA_API luna_tensor *luna_slice(luna_tensor *x, int axis, int64_t start, int64_t count) {
  int64_t shape[LUNA_MAX_RANK];
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_SLICE, "luna_slice", 1, x, NULL, NULL)) return NULL;
  if (axis < 0 || axis >= x->rank) return lunai_fail(x->ctx, LUNA_ERROR_AXIS, "luna_slice", x, (int64_t)axis);
  if (start < 0 || count < 0 || start > x->shape[axis] || count > x->shape[axis] - start)
    return lunai_fail(x->ctx, LUNA_ERROR_SLICE_RANGE, start, count, (int64_t)axis, x);
  memcpy(shape, x->shape, sizeof shape);
  shape[axis] = count;
  if (axis == 0) return lunai_view(&s, x, x->rank, shape, start * (x->shape[1] * x->shape[2] * x->shape[3]));
  s.op.arg.slice.axis = axis;
  s.op.arg.slice.start = start;
  return lunai_finish(&s, x->rank, shape);
}

LUNA_API luna_tensor *luna_permute(luna_tensor *x, const int *axes) {
  int64_t shape[LUNA_MAX_RANK];
  int a, seen = 0;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_PERMUTE, "luna_permute", 1, x, NULL, NULL)) return NULL;
  if (!axes) return lunai_fail_null(x->ctx, "luna_permute", "axes");
  for (a = 0; a < x->rank; a++) {
    if (axes[a] < 0 || axes[a] >= x->rank || (seen >> axes[a] & 1))
      return lunai_fail(x->ctx, LUNA_ERROR_PERMUTE_AXES, (int64_t)axes[a], x);
    seen |= 1 << axes[a];
    shape[a] = x->shape[axes[a]];
    s.op.arg.permute.axes[a] = axes[a];
  }
  return lunai_finish(&s, x->rank, shape);
}

LUNA_API luna_tensor *luna_transpose(luna_tensor *x, int axis, int other) {
  int axes[LUNA_MAX_RANK], a;
  if (!x) return NULL;
  if (axis < 0 || axis >= x->rank) return lunai_fail(x->ctx, LUNA_ERROR_AXIS, "luna_transpose", x, (int64_t)axis);
  if (other < 0 || other >= x->rank) return lunai_fail(x->ctx, LUNA_ERROR_AXIS, "luna_transpose", x, (int64_t)other);
  for (a = 0; a < x->rank; a++) axes[a] = a == axis ? other : a == other ? axis : a;
  return luna_permute(x, axes);
}

LUNA_API luna_tensor *luna_concat(luna_tensor *const *x, int count, int axis) {
  int64_t shape[LUNA_MAX_RANK];
  int i, a;
  lunai_build s;
  if (!lunai_all(x, count, "luna_concat") || !lunai_start(&s, LUNA_OP_CONCAT, "luna_concat", 1, x[0], NULL, NULL))
    return NULL;
  if (axis < 0 || axis >= x[0]->rank) return lunai_fail(x[0]->ctx, LUNA_ERROR_AXIS, "luna_concat", x[0], (int64_t)axis);
  memcpy(shape, x[0]->shape, sizeof shape);
  for (i = 1; i < count; i++) {
    for (a = 0; a < LUNA_MAX_RANK; a++)
      if (x[i]->rank != x[0]->rank || (a != axis && x[i]->shape[a] != shape[a]))
        return lunai_fail(x[0]->ctx, LUNA_ERROR_CONCAT_SHAPES, "luna_concat", x[0], x[i], (int64_t)axis);
    shape[axis] += x[i]->shape[axis];
    lunai_input(&s, x[i]);
  }
  s.op.arg.concat.axis = axis;
  return lunai_finish(&s, x[0]->rank, shape);
}

LUNA_API luna_tensor *luna_expand(luna_tensor *x, int64_t count) {
  int64_t shape[LUNA_MAX_RANK];
  int a;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_EXPAND, "luna_expand", 1, x, NULL, NULL)) return NULL;
  if (x->rank == LUNA_MAX_RANK) return lunai_fail(x->ctx, LUNA_ERROR_EXPAND_RANK, x);
  if (count < 0)
    return lunai_fail(x->ctx, LUNA_ERROR_VALUE_RANGE, "luna_expand", "count", count, (int64_t)0, LUNAI_MAX_COUNT);
  shape[0] = count;
  for (a = 0; a < x->rank; a++) shape[a + 1] = x->shape[a];
  s.op.arg.expand.count = count;
  return lunai_finish(&s, x->rank + 1, shape);
}

/* --- elementwise --- */
LUNAI_FN luna_tensor *lunai_elementwise(lunai_build *s) {
  int64_t shape[LUNA_MAX_RANK];
  const int rank = lunai_broadcast(&s->op, shape);
  int k;
  if (rank >= 0 || lunai_is_checked(s->op.ctx)) return lunai_finish(s, rank, shape);
  for (k = 0; k < 2; k++) {          /* which two do not fit: all but k */
    luna_tensor *left_out = s->op.in[k];
    bool fits;
    s->op.in[k] = NULL;
    fits = lunai_broadcast(&s->op, shape) >= 0;
    s->op.in[k] = left_out;
    if (!fits) break;
  }
  return lunai_fail(s->op.ctx, LUNA_ERROR_BROADCAST, s->name, s->op.in[k == 0], s->op.in[k == 2 ? 1 : 2]);
}
LUNAI_FN luna_tensor *lunai_binary(luna_op_kind kind, const char *name, luna_tensor *a, luna_tensor *b) {
  lunai_build s;
  return lunai_start(&s, kind, name, 2, a, b, NULL) ? lunai_elementwise(&s) : NULL;
}
#define LUNAI_BINARY(NAME, tier, reads, cheap, name, inputs, value, da, db, dc) \
  LUNA_API luna_tensor *luna_##name(luna_tensor *a, luna_tensor *b) { \
    return lunai_binary(LUNA_OP_##NAME, "luna_" #name, (inputs) ? a : luna_detach(a), (inputs) ? b : luna_detach(b)); \
  }
LUNA_BINARIES(LUNAI_BINARY)
#undef LUNAI_BINARY
LUNA_API luna_tensor *luna_greater(luna_tensor *a, luna_tensor *b) {
  return lunai_binary(LUNA_OP_LESS, "luna_greater", luna_detach(b), luna_detach(a));
}
LUNA_API luna_tensor *luna_greater_equal(luna_tensor *a, luna_tensor *b) {
  return lunai_binary(LUNA_OP_LESS_EQUAL, "luna_greater_equal", luna_detach(b), luna_detach(a));
}
LUNA_API luna_tensor *luna_where(luna_tensor *condition, luna_tensor *a, luna_tensor *b) {
  lunai_build s;
  if (condition && condition->needs_grad) condition = luna_detach(condition);
  return lunai_start(&s, LUNA_OP_WHERE, "luna_where", 3, condition, a, b) ? lunai_elementwise(&s) : NULL;
}
LUNA_API luna_tensor *luna_clamp(luna_tensor *x, float low, float high) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_CLAMP, "luna_clamp", 1, x, NULL, NULL)) return NULL;
  if (!(low <= high)) return lunai_fail(x->ctx, LUNA_ERROR_CLAMP, (double)low, (double)high);
  s.op.arg.elementwise.scalar[1] = low;
  s.op.arg.elementwise.scalar[2] = high;
  return lunai_elementwise(&s);
}
LUNA_API luna_tensor *luna_add_scalar(luna_tensor *x, float number) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_ADD, "luna_add_scalar", 1, x, NULL, NULL)) return NULL;
  s.op.arg.elementwise.scalar[1] = number;
  return lunai_elementwise(&s);
}

LUNA_API luna_tensor *luna_scale(luna_tensor *x, float factor) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_SCALE, "luna_scale", 1, x, NULL, NULL)) return NULL;
  s.op.arg.scale.factor = factor;
  return lunai_finish_like(&s, x);
}

LUNAI_FN luna_tensor *lunai_fail_activation(luna_ctx *ctx, const char *name, luna_activation activation, int64_t last) {
  return lunai_fail(ctx, LUNA_ERROR_VALUE_RANGE, name, "activation", (int64_t)activation, (int64_t)0, last);
}
LUNAI_FN luna_tensor *lunai_map(luna_tensor *x, luna_activation activation, const char *name) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_ACTIVATION, name, 1, x, NULL, NULL)) return NULL;
  s.op.activation = activation;
  return lunai_finish_like(&s, x);
}
#define LUNAI_MAP(NAME, name, value, slope) \
  LUNA_API luna_tensor *luna_##name(luna_tensor *x) { return lunai_map(x, LUNA_ACTIVATION_##NAME, "luna_" #name); }
LUNA_MAPS(LUNAI_MAP)
#undef LUNAI_MAP
LUNA_API luna_tensor *luna_activate(luna_tensor *x, luna_activation activation) {
  if (x && (unsigned)activation >= LUNA_ACTIVATION_COUNT) return lunai_fail_activation(x->ctx, "luna_activate",
      activation, LUNA_ACTIVATION_COUNT - 1);
  return lunai_map(x, activation, "luna_activate");
}

LUNAI_FN bool lunai_dropout_wrong(lunai_build *s, float probability) {
  if (lunai_is_checked(s->op.ctx) || (probability >= 0 && probability < 1)) return false;
  lunai_fail(s->op.ctx, LUNA_ERROR_PROBABILITY, s->name, "dropout", (double)probability);
  return true;
}
LUNA_API luna_tensor *luna_dropout(luna_tensor *x, float probability) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_DROPOUT, "luna_dropout", 1, x, NULL, NULL) || lunai_dropout_wrong(&s, probability))
    return NULL;
  if (!LUNAI_TRAINS || probability == 0 || !x->ctx->training) return x;
  s.op.dropout = probability;
  return lunai_finish_like(&s, x);
}

/* --- reductions --- */
LUNAI_FN luna_tensor *lunai_reduce(luna_tensor *x, luna_op_kind kind, int axis, bool mean, const char *name) {
  int64_t shape[LUNA_MAX_RANK] = { 1, 1, 1, 1 };
  int a, to = 0;
  lunai_build s;
  if (!lunai_start(&s, kind, name, 1, x, NULL, NULL)) return NULL;
  if (axis < 0 || axis >= x->rank) return lunai_fail(x->ctx, LUNA_ERROR_AXIS, name, x, (int64_t)axis);
  s.op.arg.reduce.outer = s.op.arg.reduce.inner = 1;
  for (a = 0; a < x->rank; a++) {
    if (a != axis) shape[to++] = x->shape[a];
    if (a != axis) *(a < axis ? &s.op.arg.reduce.outer : &s.op.arg.reduce.inner) *= x->shape[a];
  }
  s.op.arg.reduce.axis = x->shape[axis];
  s.op.arg.reduce.factor = mean && x->shape[axis] ? 1.0f / (float)x->shape[axis] : 1.0f;
  if (kind == LUNA_OP_CUMSUM) return lunai_finish_like(&s, x);
  return x->rank == 1 ? lunai_finish(&s, 1, shape) : lunai_finish(&s, x->rank - 1, shape);
}
LUNA_API luna_tensor *luna_sum(luna_tensor *x, int axis) {
  return lunai_reduce(x, LUNA_OP_REDUCE, axis, false, "luna_sum");
}
LUNA_API luna_tensor *luna_mean(luna_tensor *x, int axis) {
  return lunai_reduce(x, LUNA_OP_REDUCE, axis, true, "luna_mean");
}
LUNAI_FN luna_tensor *lunai_flat(luna_tensor *x) {
  const int64_t count = luna_count(x);
  return x ? luna_reshape(x, 1, &count) : NULL;
}
LUNA_API luna_tensor *luna_sum_all(luna_tensor *x) {
  return lunai_reduce(lunai_flat(x), LUNA_OP_REDUCE, 0, false, "luna_sum_all");
}
LUNA_API luna_tensor *luna_mean_all(luna_tensor *x) {
  return lunai_reduce(lunai_flat(x), LUNA_OP_REDUCE, 0, true, "luna_mean_all");
}
LUNA_API luna_tensor *luna_cumsum(luna_tensor *x, int axis) {
  return lunai_reduce(x, LUNA_OP_CUMSUM, axis, false, "luna_cumsum");
}
LUNA_API luna_tensor *luna_max(luna_tensor *x, int axis) {
  return lunai_reduce(x, LUNA_OP_MAX, axis, false, "luna_max");
}

/* --- products --- */
LUNAI_FN luna_tensor *lunai_matmul_by(luna_tensor *a, luna_tensor *b, bool transpose_a, bool transpose_b, bool dots) {
  int64_t shape[LUNA_MAX_RANK] = { 1, 1, 1, 1 }, m, n, k, kb;
  int i;
  bool good;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_MATMUL, "luna_matmul", 2, a, b, NULL)) return NULL;
  good = lunai_is_checked(a->ctx) || (a->rank >= 2 && b->rank >= 2 && b->rank <= a->rank);
  for (i = 3; good && i <= b->rank && !lunai_is_checked(a->ctx); i++)
    good = a->shape[a->rank - i] == b->shape[b->rank - i];
  if (!good) return lunai_fail(a->ctx, LUNA_ERROR_MATMUL_AXES, a, b);
  m = a->shape[a->rank - (transpose_a ? 1 : 2)];
  k = a->shape[a->rank - (transpose_a ? 2 : 1)];
  kb = b->shape[b->rank - (transpose_b ? 1 : 2)];
  n = b->shape[b->rank - (transpose_b ? 2 : 1)];
  if (k != kb) return lunai_fail(a->ctx, LUNA_ERROR_MATMUL_INNER, a, b, k, kb);
  s.op.arg.matmul.outer = s.op.arg.matmul.inner = 1;
  for (i = 0; i < a->rank - 2; i++) {
    shape[i] = a->shape[i];
    *(a->rank - i <= b->rank ? &s.op.arg.matmul.inner : &s.op.arg.matmul.outer) *= a->shape[i];
  }
  shape[a->rank - 2] = m;
  shape[a->rank - 1] = n;
  s.op.arg.matmul.m = m;
  s.op.arg.matmul.n = n;
  s.op.arg.matmul.k = k;
  s.op.arg.matmul.transpose_a = transpose_a;
  s.op.arg.matmul.transpose_b = transpose_b;
  s.op.dots = dots;
  return lunai_finish(&s, a->rank, shape);
}
LUNA_API luna_tensor *luna_matmul(luna_tensor *a, luna_tensor *b, bool transpose_a, bool transpose_b) {
  return lunai_matmul_by(a, b, transpose_a, transpose_b, false);
}

/* whether a vector, where it is there, has that size; a weight [out, in] */
LUNAI_FN bool lunai_is_vector(luna_ctx *ctx, const char *name, const char *what, const luna_tensor *t, int64_t size) {
  if (lunai_is_checked(ctx) || !t || (t->rank == 1 && t->shape[0] == size)) return true;
  return lunai_fail(ctx, LUNA_ERROR_VECTOR_SHAPE, name, what, t, size) != NULL;
}
LUNAI_FN bool lunai_is_weight(luna_ctx *ctx, const char *name, const char *what, const luna_tensor *t, int64_t in) {
  if (lunai_is_checked(ctx) || (t->rank == 2 && t->shape[1] == in)) return true;
  return lunai_fail(ctx, LUNA_ERROR_WEIGHT_SHAPE, name, what, t, in) != NULL;
}
LUNAI_FN bool lunai_has_rank(const char *name, const luna_tensor *t, int rank) {
  return lunai_is_checked(t->ctx) || t->rank >= rank || lunai_fail(t->ctx, LUNA_ERROR_RANK, name, t,
                                                                   (int64_t)rank) != NULL;
}

/* whether x, weight and bias go together; false: the failure is reported */
LUNAI_FN bool lunai_linear_fits(const lunai_build *s, const luna_tensor *bias) {
  const luna_tensor *x = s->op.in[0], *weight = s->op.in[1];
  return lunai_has_rank(s->name, x, 1) && lunai_is_weight(x->ctx, s->name, "weight", weight, lunai_last(x)) &&
         lunai_is_vector(x->ctx, s->name, "bias", bias, weight->shape[0]);
}
/* whether a stream computes single rows */
LUNAI_FN bool lunai_is_single_row(const luna_tensor *x) { return LUNAI_BUMPS(x->ctx) && x->ctx->bump->single; }
/* act(x W^T + b), or drop(x W^T + b) + residual, which in a stream is an op of its own */
LUNAI_FN luna_tensor *lunai_linear_with(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                        luna_activation activation, luna_tensor *residual, float dropout) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_LINEAR, "luna_linear", 2, x, weight, NULL) || !lunai_linear_fits(&s, bias)) return NULL;
  if (LUNAI_BUMPS(x->ctx) && residual)
    return luna_add(residual, lunai_linear_with(x, weight, bias, activation, NULL, dropout));
  s.op.dots = lunai_is_single_row(x);
  lunai_input(&s, bias);
  s.op.activation = activation;
  s.op.last_dropout = dropout;
  lunai_input(&s, residual);
  return lunai_finish_rows(&s, weight->shape[0]);
}
LUNAI_FN luna_tensor *lunai_linear_activated(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                             luna_activation activation) {
  return lunai_linear_with(x, weight, bias, activation, NULL, 0);
}
LUNA_API luna_tensor *luna_linear(luna_tensor *x, luna_tensor *weight, luna_tensor *bias) {
  return lunai_linear_activated(x, weight, bias, LUNA_ACTIVATION_NONE);
}

/* whether a feed-forward layer's inputs, of which x and w1 are in the op, go together; false: the failure is
   reported */
LUNAI_FN bool lunai_feed_forward_fits(lunai_build *s, const luna_tensor *b1, const luna_tensor *w2,
                                      const luna_tensor *b2, luna_activation activation,
                                      const luna_feed_forward_config *c) {
  const luna_tensor *x = s->op.in[0], *w1 = s->op.in[1];
  luna_ctx *ctx = x->ctx;
  luna_tensor want;
  if (lunai_dropout_wrong(s, c->dropout) || lunai_dropout_wrong(s, c->activation_dropout)) return false;
  if (!w2) return lunai_fail_null(ctx, s->name, "w2") != NULL;
  if (lunai_is_checked(ctx)) return true;
  if (!lunai_is_activation(activation))
    return lunai_fail_activation(ctx, s->name, activation, LUNA_ACTIVATION_TANH) != NULL;
  if (!lunai_has_rank(s->name, x, 1) || !lunai_is_weight(ctx, s->name, "w1", w1, lunai_last(x)) ||
      !lunai_is_weight(ctx, s->name, "w2", w2, w1->shape[0]) ||
      !lunai_is_vector(ctx, s->name, "b1", b1, w1->shape[0]) ||
      !lunai_is_vector(ctx, s->name, "b2", b2, w2->shape[0])) return false;
  if (lunai_checked(lunai_rows(x), w1->shape[0]) < 0)
    return lunai_fail(ctx, LUNA_ERROR_TOO_LARGE, s->name, lunai_rows(x), w1->shape[0], LUNAI_MAX_COUNT) != NULL;
  lunai_tensor_set(&want, ctx, x->rank, x->shape);
  want.shape[x->rank - 1] = w2->shape[0];
  if (c->residual && (c->residual->rank != x->rank || memcmp(c->residual->shape, want.shape, sizeof want.shape) != 0))
    return lunai_fail(ctx, LUNA_ERROR_RESIDUAL_SHAPE, s->name, c->residual, &want) != NULL;
  if (!c->gate) return true;
  if (!lunai_is_weight(ctx, s->name, "gate", c->gate, lunai_last(x)) ||
      !lunai_is_vector(ctx, s->name, "gate_bias", c->gate_bias, w1->shape[0])) return false;
  return c->gate->shape[0] == w1->shape[0] ||
         lunai_fail(ctx, LUNA_ERROR_BROADCAST, s->name, w1, c->gate) != NULL;
}
LUNA_API luna_tensor *luna_feed_forward(luna_tensor *x, luna_tensor *w1, luna_tensor *b1, luna_tensor *w2,
                                        luna_tensor *b2, const luna_feed_forward_config *config) {
  static const luna_feed_forward_config defaults = { LUNA_ACTIVATION_NONE, 0, 0, NULL, false, NULL, NULL };
  const luna_feed_forward_config *c = config ? config : &defaults;
  const luna_activation activation = c->activation == LUNA_ACTIVATION_NONE ? LUNA_ACTIVATION_RELU : c->activation;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_FEED_FORWARD, "luna_feed_forward", 2, x, w1, NULL) ||
      !lunai_feed_forward_fits(&s, b1, w2, b2, activation, c)) return NULL;
  if (c->gate || LUNAI_BUMPS(x->ctx) || !x->ctx->backend->op[LUNA_OP_FEED_FORWARD].forward) {
    const luna_scope scope = c->recompute ? luna_scope_recompute(x->ctx) : luna_scope_begin(x->ctx);
    luna_tensor *y = lunai_linear_activated(x, w1, b1, activation);
    if (c->gate) y = luna_mul(y, luna_linear(x, c->gate, c->gate_bias));
    y = luna_dropout(luna_linear(luna_dropout(y, c->activation_dropout), w2, b2), c->dropout);
    return lunai_result(scope, c->residual ? luna_add(c->residual, y) : y);
  }
  lunai_input(&s, b1);
  lunai_input(&s, w2);
  lunai_input(&s, b2);
  lunai_input(&s, c->residual);
  s.op.activation = activation;
  s.op.dropout = c->activation_dropout;
  s.op.last_dropout = c->dropout;
  s.op.arg.feed_forward.recompute = c->recompute;
  return lunai_finish_rows(&s, w2->shape[0]);
}

/* --- rows --- */
LUNA_API luna_tensor *luna_softmax(luna_tensor *x, const int32_t *lengths) {
  bool failed = false;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_SOFTMAX, "luna_softmax", 1, x, NULL, NULL)) return NULL;
  if (!lunai_has_rank("luna_softmax", x, lengths ? 2 : 1)) return NULL;
  s.op.lengths = lunai_integers(&s, lengths, x->shape[0], 0, INT32_MAX, "lengths", &failed);
  return failed ? lunai_abandon(&s) : lunai_finish_like(&s, x);
}

LUNAI_FN luna_tensor *lunai_mask(luna_tensor *x, const int32_t *lengths, float fill) {
  int64_t b;
  bool failed = false, full = true;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_MASK, "luna_mask", 1, x, NULL, NULL)) return NULL;
  if (lengths && !lunai_has_rank("luna_mask", x, 2)) return NULL;
  for (b = 0; lengths && b < x->shape[0]; b++) full = full && lengths[b] >= x->shape[1];
  if (full) return x;
  s.op.lengths = lunai_integers(&s, lengths, x->shape[0], 0, INT32_MAX, "lengths", &failed);
  s.op.arg.mask.width = x->shape[2] * x->shape[3];
  s.op.arg.mask.fill = fill;
  return failed ? lunai_abandon(&s) : lunai_finish_like(&s, x);
}
LUNA_API luna_tensor *luna_mask(luna_tensor *x, const int32_t *lengths) { return lunai_mask(x, lengths, 0); }

/* x as [count, 1], with `fill` where keep, in the step, has 0 and not 1; what was there is not read */
LUNAI_FN luna_tensor *lunai_select(luna_tensor *x, const int32_t *keep, float fill, const char *name) {
  int64_t shape[2];
  lunai_build s;
  shape[0] = luna_count(x);
  shape[1] = 1;
  if ((x = luna_reshape(x, 2, shape)) == NULL || !lunai_start(&s, LUNA_OP_MASK, name, 1, x, NULL, NULL)) return NULL;
  s.op.lengths = lunai_on_device(x->ctx) ? lunai_integers_copy(&s, keep, shape[0]) : keep;
  s.op.arg.mask.width = 1;
  s.op.arg.mask.fill = fill;
  return s.op.lengths ? lunai_finish_like(&s, x) : lunai_abandon(&s);
}

LUNA_API luna_tensor *luna_ratio(luna_tensor *x) {
  int64_t shape[LUNA_MAX_RANK];
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_RATIO, "luna_ratio", 1, x, NULL, NULL)) return NULL;
  if (x->rank < 1 || lunai_last(x) < 1) return lunai_fail(x->ctx, LUNA_ERROR_RATIO_EMPTY, x);
  memcpy(shape, x->shape, sizeof shape);
  shape[x->rank - 1]--;
  return lunai_finish(&s, x->rank, shape);
}

LUNAI_FN luna_tensor *lunai_norm(luna_tensor *x, luna_tensor *weight, luna_tensor *bias, bool rms, const char *name) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_LAYER_NORM, name, 1, x, NULL, NULL)) return NULL;
  if (!lunai_has_rank(name, x, 1) || !lunai_is_vector(x->ctx, name, "weight", weight, lunai_last(x)) ||
      !lunai_is_vector(x->ctx, name, "bias", bias, lunai_last(x))) return NULL;
  s.op.arg.norm.rms = rms;
  lunai_input(&s, weight);
  lunai_input(&s, bias);
  return lunai_finish_like(&s, x);
}
LUNA_API luna_tensor *luna_layer_norm(luna_tensor *x, luna_tensor *weight, luna_tensor *bias) {
  return lunai_norm(x, weight, bias, false, "luna_layer_norm");
}
LUNA_API luna_tensor *luna_rms_norm(luna_tensor *x, luna_tensor *weight) {
  return lunai_norm(x, weight, NULL, true, "luna_rms_norm");
}

LUNA_API luna_tensor *luna_embedding(luna_tensor *table, const int32_t *tokens, int64_t batch, int64_t n) {
  int64_t shape[3];
  bool failed = false;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_EMBEDDING, "luna_embedding", 1, table, NULL, NULL)) return NULL;
  if (table->rank != 2) return lunai_fail(table->ctx, LUNA_ERROR_EMBEDDING_TABLE, table);
  shape[0] = batch;
  shape[1] = n;
  if (lunai_shape_count(2, shape) < 0) return lunai_fail_shape(table->ctx, "luna_embedding", 2, shape);
  if (!tokens && batch * n > 0) return lunai_fail_null(table->ctx, "luna_embedding", "tokens");
  s.op.index = lunai_integers(&s, tokens, batch * n, 0, table->shape[0] - 1, "tokens", &failed);
  shape[2] = table->shape[1];
  return failed ? lunai_abandon(&s) : lunai_finish(&s, 3, shape);
}

/* x [n, ...] as [n, d] */
LUNAI_FN luna_tensor *lunai_as_rows(luna_tensor *x, const char *name) {
  int64_t shape[2];
  if (!x || x->rank == 2) return x;
  if (!lunai_has_rank(name, x, 1)) return NULL;
  shape[0] = x->shape[0];
  shape[1] = x->shape[1] * x->shape[2] * x->shape[3];
  return luna_reshape(x, 2, shape);
}
/* the end of an op of rows: indices in 0..n - 1, and the result [rows, d] shaped as x but for its first axis */
LUNAI_FN luna_tensor *lunai_indexed(lunai_build *s, const luna_tensor *x, const int32_t *indices, int64_t count,
    int64_t rows) {
  int64_t shape[LUNA_MAX_RANK], flat[2];
  bool failed = false;
  luna_tensor *y;
  memcpy(shape, x->shape, sizeof shape);
  shape[0] = flat[0] = rows;
  flat[1] = s->op.in[0]->shape[1];
  if (lunai_shape_count(x->rank, shape) < 0) return lunai_fail_shape(x->ctx, s->name, x->rank, shape);
  if (!indices && count > 0) return lunai_fail_null(x->ctx, s->name, "indices");
  s->op.index = lunai_integers(s, indices, count, 0, x->shape[0] - 1, "indices", &failed);
  y = failed ? lunai_abandon(s) : lunai_finish(s, 2, flat);
  return y && x->rank != 2 ? luna_reshape(y, x->rank, shape) : y;
}
LUNA_API luna_tensor *luna_gather_rows(luna_tensor *x, const int32_t *indices, int64_t count) {
  luna_tensor *flat = lunai_as_rows(x, "luna_gather_rows");
  lunai_build s;
  return lunai_start(&s, LUNA_OP_EMBEDDING, "luna_gather_rows", 1, flat, NULL, NULL) ? lunai_indexed(&s, x, indices,
      count, count) : NULL;
}
LUNA_API luna_tensor *luna_scatter_add_rows(luna_tensor *x, const int32_t *indices, luna_tensor *rows) {
  luna_tensor *flat = lunai_as_rows(x, "luna_scatter_add_rows"), *added = flat ? lunai_as_rows(rows,
      "luna_scatter_add_rows") : NULL;
  lunai_build s;
  int a;
  if (!flat && rows && !x) return lunai_fail_null(rows->ctx, "luna_scatter_add_rows", "x");
  if (!lunai_start(&s, LUNA_OP_SCATTER_ADD, "luna_scatter_add_rows", 2, flat, added, NULL)) return NULL;
  for (a = 1; a < LUNA_MAX_RANK; a++)
    if (rows->rank != x->rank || rows->shape[a] != x->shape[a])
      return lunai_fail(x->ctx, LUNA_ERROR_CONCAT_SHAPES, "luna_scatter_add_rows", x, rows, (int64_t)0);
  return lunai_indexed(&s, x, indices, rows->shape[0], x->shape[0]);
}

/* Labels of `rows` rows and the config into an op; false: the failure is reported */
LUNAI_FN bool lunai_labels(lunai_build *s, int64_t rows, int64_t classes, const int32_t *labels,
                           const luna_cross_entropy_config *config) {
  luna_ctx *ctx = s->op.ctx;
  luna_cross_entropy_config c;
  int64_t i, counted = 0;
  void *memory;
  int32_t *kept;
  if (config) c = *config;
  else memset(&c, 0, sizeof c);
  if (!labels) return lunai_fail_null(ctx, s->name, "labels") != NULL;
  if (!(c.smoothing >= 0 && c.smoothing <= 1))
    return lunai_fail(ctx, LUNA_ERROR_SMOOTHING, s->name, (double)c.smoothing) != NULL;
  if (!lunai_step(ctx, (size_t)rows * sizeof(int32_t), false, &memory))
    return lunai_op_no_memory(s, (size_t)rows * sizeof(int32_t)) != NULL;
  kept = (int32_t *)memory;
  for (i = 0; i < rows; i++) {
    const bool ignored = labels[i] < 0 || (c.ignore && labels[i] == c.ignore_index);
    const int32_t label = ignored ? -1 : labels[i];
    if (label >= classes)
      return lunai_fail(ctx, LUNA_ERROR_LABEL_RANGE, s->name, i, (int64_t)label, classes) != NULL;
    counted += !ignored;
    kept[i] = label;
  }
  s->op.index = lunai_on_device(ctx) ? lunai_integers_copy(s, kept, rows) : kept;
  s->op.arg.cross_entropy.smoothing = c.smoothing;
  s->op.arg.cross_entropy.factor = c.sum || counted == 0 ? 1.0f : 1.0f / (float)counted;
  return rows == 0 || s->op.index != NULL;
}
LUNA_API luna_tensor *luna_cross_entropy(luna_tensor *logits, const int32_t *labels) {
  return luna_cross_entropy_with(logits, labels, NULL);
}
LUNA_API luna_tensor *luna_cross_entropy_with(luna_tensor *logits, const int32_t *labels,
                                              const luna_cross_entropy_config *config) {
  const int64_t one = 1;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_CROSS_ENTROPY, "luna_cross_entropy", 1, logits, NULL, NULL)) return NULL;
  if (!lunai_has_rank(s.name, logits, 1)) return NULL;
  return lunai_labels(&s, lunai_rows(logits), lunai_last(logits), labels, config) ? lunai_finish(&s, 1, &one) :
      lunai_abandon(&s);
}

LUNAI_FN bool lunai_has_op(const luna_tensor *t, luna_op_kind kind) {
  return t->ctx->backend->op[kind].forward != NULL;
}
LUNA_API luna_tensor *luna_linear_cross_entropy(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                                const int32_t *labels, const luna_cross_entropy_config *config) {
  const int64_t one = 1;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_LINEAR_CROSS_ENTROPY, "luna_linear_cross_entropy", 2, x, weight, NULL) ||
      !lunai_linear_fits(&s, bias)) return NULL;
  /* a panel is all the logits, or the backend has none */
  if (weight->shape[0] <= LUNAI_LOGIT_COLUMNS || !lunai_has_op(x, LUNA_OP_LINEAR_CROSS_ENTROPY))
    return luna_cross_entropy_with(luna_linear(x, weight, bias), labels, config);
  lunai_input(&s, bias);
  if (lunai_checked(lunai_rows(x), weight->shape[0]) < 0) {
    lunai_fail(x->ctx, LUNA_ERROR_TOO_MANY_LOGITS, s.name, x, weight);
    return lunai_abandon(&s);
  }
  return lunai_labels(&s, lunai_rows(x), weight->shape[0], labels, config) ? lunai_finish(&s, 1, &one) :
      lunai_abandon(&s);
}

/* --- losses of numbers, composed of the ops above --- */
typedef struct lunai_targets {
  luna_tensor *x;                    /* the values [count, 1], 0 where there is no target */
  const int32_t *given;              /* [count], 1 where there is one */
  float share;                       /* 1 / how many there are */
} lunai_targets;
LUNAI_FN bool lunai_targets_take(lunai_targets *t, luna_tensor *values, const float *targets, const char *name) {
  const int64_t count = luna_count(values);
  int64_t i, counted = 0;
  lunai_build s;
  void *memory;
  int32_t *given;
  if (!lunai_start(&s, LUNA_OP_COUNT, name, 1, values, NULL, NULL)) return false;
  if (!targets && count > 0) return lunai_fail_null(values->ctx, name, "targets") != NULL;
  if (!lunai_step(values->ctx, (size_t)lunai_max(1, count) * sizeof(int32_t), false, &memory))
    return lunai_op_no_memory(&s, (size_t)count * sizeof(int32_t)) != NULL;
  t->given = given = (int32_t *)memory;
  for (i = 0; i < count; i++) counted += given[i] = targets[i] == targets[i];
  t->share = counted ? (float)(1.0 / (double)counted) : 1.0f;
  t->x = lunai_select(values, given, 0, name);
  return t->x != NULL;
}
/* the values less their targets [count, 1], 0 where there is none */
LUNAI_FN luna_tensor *lunai_errors(lunai_targets *t, luna_tensor *values, const float *targets, const char *name) {
  if (!lunai_targets_take(t, values, targets, name)) return NULL;
  return lunai_select(luna_sub(t->x, luna_tensor_new(t->x->ctx, targets, 2, t->x->shape)), t->given, 0, name);
}
LUNAI_FN luna_tensor *lunai_mean_given(const lunai_targets *t, luna_tensor *losses) {
  return luna_scale(luna_sum(losses, 0), t->share);
}

LUNA_API luna_tensor *luna_mse(luna_tensor *values, const float *targets) {
  const luna_scope scope = luna_scope_begin(values ? values->ctx : NULL);
  lunai_targets t;
  luna_tensor *e = lunai_errors(&t, values, targets, "luna_mse");
  return e ? lunai_result(scope, lunai_mean_given(&t, luna_mul(e, e))) : NULL;
}

/* r (e - r / 2), r = e within delta of 0: no difference of large numbers */
LUNA_API luna_tensor *luna_huber(luna_tensor *values, const float *targets, float delta) {
  const luna_scope scope = luna_scope_begin(values ? values->ctx : NULL);
  lunai_targets t;
  luna_tensor *e, *r;
  if (delta == 0) delta = 1;
  if (values && !(delta > 0 && lunai_is_finite(delta)))
    return lunai_fail(values->ctx, LUNA_ERROR_NEGATIVE, "luna_huber", "delta", (double)delta);
  if ((e = lunai_errors(&t, values, targets, "luna_huber")) == NULL) return NULL;
  r = luna_clamp(e, -delta, delta);
  return lunai_result(scope, lunai_mean_given(&t, luna_mul(r, luna_sub(e, luna_scale(r, 0.5f)))));
}

/* t ln(1 + e^-x) + (1 - t) ln(1 + e^x): accurate for confident logits too */
LUNA_API luna_tensor *luna_binary_cross_entropy(luna_tensor *logits, const float *targets) {
  const luna_scope scope = luna_scope_begin(logits ? logits->ctx : NULL);
  lunai_targets t;
  luna_tensor *y, *yes, *no;
  int64_t i;
  for (i = 0; targets && i < luna_count(logits); i++)
    if (targets[i] < 0 || targets[i] > 1)
      return lunai_fail(logits->ctx, LUNA_ERROR_TARGET_RANGE, "luna_binary_cross_entropy", i, (double)targets[i]);
  if (!lunai_targets_take(&t, logits, targets, "luna_binary_cross_entropy")) return NULL;
  y = luna_tensor_new(t.x->ctx, targets, 2, t.x->shape);
  no = luna_add_scalar(luna_scale(y, -1), 1);
  yes = luna_mul(luna_softplus(luna_scale(t.x, -1)), y ? lunai_select(y, t.given, 0, "luna_binary_cross_entropy") :
                 NULL);
  no = luna_mul(luna_softplus(t.x), no ? lunai_select(no, t.given, 0, "luna_binary_cross_entropy") : NULL);
  return lunai_result(scope, lunai_mean_given(&t, luna_add(yes, no)));
}

/* --- attention --- */
LUNAI_FN luna_tensor *lunai_attention_wrong(lunai_build *s) {
  return lunai_fail(s->op.ctx, LUNA_ERROR_ATTENTION_SHAPES, s->name, s->op.in[0], s->op.in[1], s->op.in[2],
                    s->op.arg.attention.heads);
}

/* offsets of a ragged batch: from 0 up, never down, to the number of rows */
LUNAI_FN const int32_t *lunai_offsets(lunai_build *s, const int32_t *offsets, int64_t count, int64_t rows,
                                      const char *what, bool *failed) {
  int64_t i;
  const int32_t *kept = lunai_integers(s, offsets, count + 1, 0, rows, what, failed);
  for (i = 0; i <= count && !*failed; i++)
    if (i == 0 ? offsets[i] != 0 : offsets[i] < offsets[i - 1] || (i == count && offsets[i] != rows)) {
      lunai_fail(s->op.ctx, LUNA_ERROR_OFFSETS, s->name, what, i, (int64_t)offsets[i], rows);
      *failed = true;
    }
  return kept;
}

LUNAI_FN bool lunai_scale_wrong(lunai_build *s, float scale) {
  if (lunai_is_finite(scale)) return false;
  lunai_fail(s->op.ctx, LUNA_ERROR_NOT_FINITE_ARGUMENT, s->name, "scale", (double)scale);
  return true;
}
LUNAI_FN bool lunai_attention_shapes(lunai_build *s, const luna_attention_config *c, bool ragged) {
  const luna_tensor *q = s->op.in[0], *k = s->op.in[1], *v = s->op.in[2];
  const int64_t heads = c->heads ? c->heads : 1;
  const int axis = ragged ? 0 : 1;
  int64_t batch, longest = 0, b;
  s->op.arg.attention.heads = heads;
  if (q->rank != axis + 2 || k->rank != axis + 2 || v->rank != axis + 2 || heads < 1 || lunai_last(q) != lunai_last(k))
    return false;
  if (lunai_last(q) % heads || lunai_last(v) % heads || lunai_last(q) == 0 || lunai_last(v) == 0 ||
      k->shape[axis] != v->shape[axis]) return false;
  if (lunai_last(q) / heads > LUNAI_MAX_SCRATCH || lunai_last(v) / heads > LUNAI_MAX_SCRATCH) return false;
  if (ragged) {
    for (b = 0; b < c->sequences; b++)
      longest = lunai_max(longest, (int64_t)c->query_offsets[b + 1] - c->query_offsets[b]);
    s->op.arg.attention.batch = c->sequences;
    s->op.arg.attention.queries = longest;
    for (longest = 0, b = 0; b < c->sequences; b++)
      longest = lunai_max(longest, (int64_t)c->key_offsets[b + 1] - c->key_offsets[b]);
    s->op.arg.attention.keys = longest;
    return true;
  }
  batch = lunai_max(q->shape[0], lunai_max(k->shape[0], v->shape[0]));
  if (q->shape[0] == 0 || k->shape[0] == 0 || v->shape[0] == 0) batch = 0;
  if ((q->shape[0] != batch && q->shape[0] != 1) || (k->shape[0] != batch && k->shape[0] != 1) ||
      (v->shape[0] != batch && v->shape[0] != 1)) return false;
  s->op.arg.attention.batch = batch;
  s->op.arg.attention.queries = q->shape[1];
  s->op.arg.attention.keys = k->shape[1];
  return true;
}

/* one pattern's arrays copied to `at`, or where it is null only counted; the bytes */
LUNAI_FN size_t lunai_pattern_copy(luna_attention_pattern *p, char *at) {
  const size_t number = sizeof(int32_t), starts = (size_t)(p->blocks + 1) * number;
  const void *from[5];
  size_t sizes[5], bytes = 0;
  int i;
  if (p->blocks == 0) return 0;
  from[0] = p->queries; from[1] = p->offsets; from[2] = p->runs; from[3] = p->query_order; from[4] = p->key_order;
  sizes[0] = sizes[1] = starts;
  sizes[2] = (size_t)p->offsets[p->blocks] * sizeof(luna_key_run);
  sizes[3] = (size_t)p->queries[p->blocks] * number;
  sizes[4] = p->key_order ? (size_t)p->key_count * number : 0;
  for (i = 0; i < 5; bytes += lunai_round(sizes[i++])) {
    if (!at || !from[i]) continue;
    lunai_copy(at + bytes, from[i], sizes[i]);
    from[i] = at + bytes;
  }
  p->queries = (const int32_t *)from[0]; p->offsets = (const int32_t *)from[1];
  p->runs = (const luna_key_run *)from[2];
  p->query_order = (const int32_t *)from[3]; p->key_order = (const int32_t *)from[4];
  return bytes;
}
/* copies patterns into the step; null: no memory */
LUNAI_FN const luna_attention_pattern *lunai_patterns_copy(lunai_build *s, const luna_attention_pattern *from,
                                                           int64_t count) {
  const size_t structs = lunai_round((size_t)count * sizeof *from);
  size_t bytes = structs;
  luna_attention_pattern p, *to;
  void *memory;
  int64_t i;
  for (i = 0; i < count; i++) {
    p = from[i];
    bytes += lunai_pattern_copy(&p, NULL);
  }
  if (!lunai_step(s->op.ctx, bytes, false, &memory)) {
    lunai_op_no_memory(s, bytes);
    return NULL;
  }
  to = (luna_attention_pattern *)memory;
  memcpy(to, from, (size_t)count * sizeof *from);
  for (i = 0, bytes = structs; i < count; i++) bytes += lunai_pattern_copy(&to[i], (char *)memory + bytes);
  return to;
}

LUNA_API luna_tensor *luna_softmax_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                             const luna_attention_config *config) {
  static const luna_attention_config other_attention = { 1, NULL, NULL, NULL, 0, false, 0, 0, NULL, NULL, 0, NULL };
  const luna_attention_config *c = config ? config : &other_attention;
  const bool ragged = c->sequences > 0, sparse = c->patterns || c->log_sum_exp;
  int64_t shape[3], sums[3];
  bool failed = false;
  lunai_build s;
  if (!lunai_start(&s, sparse ? LUNA_OP_SPARSE_ATTENTION : LUNA_OP_SOFTMAX_ATTENTION, "luna_softmax_attention", 3, q, k,
                   v) || lunai_dropout_wrong(&s, c->dropout) || lunai_scale_wrong(&s, c->scale)) return NULL;
  if (lunai_checked(c->sequences, 1) < 0)
    return lunai_fail(q->ctx, LUNA_ERROR_VALUE_RANGE, "luna_softmax_attention", "sequences", c->sequences, (int64_t)0,
                      LUNAI_MAX_COUNT);
  if (ragged && !c->query_offsets) return lunai_fail_null(q->ctx, "luna_softmax_attention", "query_offsets");
  if (ragged && !c->key_offsets) return lunai_fail_null(q->ctx, "luna_softmax_attention", "key_offsets");
  if (ragged && c->lengths) return lunai_fail(q->ctx, LUNA_ERROR_RAGGED_LENGTHS, c->sequences);
  if (!lunai_attention_shapes(&s, c, ragged)) return lunai_attention_wrong(&s);
  s.op.lengths = lunai_integers(&s, c->lengths, s.op.arg.attention.batch, 0, s.op.arg.attention.keys, "lengths",
                                &failed);
  if (ragged) {
    s.op.query_offsets = lunai_offsets(&s, c->query_offsets, c->sequences, q->shape[0], "query_offsets", &failed);
    s.op.key_offsets = lunai_offsets(&s, c->key_offsets, c->sequences, k->shape[0], "key_offsets", &failed);
  }
  if (failed) return lunai_abandon(&s);
  if ((sparse && (ragged || c->sums)) || !lunai_patterns_are_good(c->patterns, c->pattern_count,
      s.op.arg.attention.batch, s.op.arg.attention.heads,
                                                      s.op.arg.attention.queries, s.op.arg.attention.keys)) {
    lunai_fail(q->ctx, LUNA_ERROR_PATTERNS, s.name, c->pattern_count, s.op.arg.attention.batch,
               s.op.arg.attention.heads,
               s.op.arg.attention.queries, s.op.arg.attention.keys);
    return lunai_abandon(&s);
  }
  s.op.arg.attention.pattern_count = c->pattern_count;
  if (c->patterns && (s.op.arg.attention.patterns = lunai_patterns_copy(&s, c->patterns, c->pattern_count)) == NULL)
    return NULL;
  s.op.arg.attention.causal = c->causal;
  s.op.arg.attention.scale = c->scale == 0 ? (float)(1.0 / sqrt((double)(lunai_last(q) / s.op.arg.attention.heads))) :
      c->scale;
  s.op.dropout = c->dropout;
  shape[0] = ragged ? q->shape[0] : s.op.arg.attention.batch;
  shape[1] = ragged ? lunai_last(v) : q->shape[1];
  shape[2] = lunai_last(v);
  sums[0] = shape[0];
  sums[1] = ragged ? s.op.arg.attention.heads : q->shape[1];
  sums[2] = s.op.arg.attention.heads;
  return lunai_finish_two(&s, ragged ? 2 : 3, shape, sparse ? c->log_sum_exp : c->sums, ragged ? 2 : 3, sums);
}

LUNA_API luna_tensor *luna_causal_product(luna_tensor *x, luna_tensor *y, luna_tensor *z, int64_t heads) {
  lunai_build s;
  bool good;
  if (!lunai_start(&s, LUNA_OP_CAUSAL_PRODUCT, "luna_causal_product", 3, x, y, z)) return NULL;
  good = x->rank == 3 && y->rank == 3 && z->rank == 3 && heads >= 1;
  good = good && x->shape[0] == y->shape[0] && x->shape[0] == z->shape[0] && x->shape[1] == y->shape[1] &&
      x->shape[1] == z->shape[1];
  good = good && x->shape[2] == y->shape[2] && x->shape[2] > 0 && z->shape[2] > 0 && x->shape[2] % heads == 0 &&
      z->shape[2] % heads == 0;
  good = good && lunai_causal_fits(x->shape[2] / heads, z->shape[2] / heads);
  if (!good) return lunai_fail(x->ctx, LUNA_ERROR_CAUSAL_PRODUCT_SHAPES, x, y, z, heads);
  s.op.arg.causal.heads = heads;
  return lunai_finish_like(&s, z);
}

LUNAI_FN luna_tensor *lunai_short_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias,
                                              const lunai_past *past) {
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_SHORT_CONVOLUTION, "luna_short_convolution", 2, x, weight, NULL)) return NULL;
  if (!lunai_is_checked(x->ctx) &&
      (x->rank != 3 || weight->rank != 2 || weight->shape[0] != x->shape[2] || weight->shape[1] < 1))
    return lunai_fail(x->ctx, LUNA_ERROR_CONVOLUTION_SHAPES, x, weight);
  if (!lunai_is_vector(x->ctx, "luna_short_convolution", "bias", bias, x->shape[2])) return NULL;
  lunai_input(&s, bias);
  if (past) s.op.history = past->history;
  return lunai_finish_like(&s, x);
}
LUNA_API luna_tensor *luna_short_convolution(luna_tensor *x, luna_tensor *weight, luna_tensor *bias) {
  return lunai_short_convolution(x, weight, bias, NULL);
}

LUNA_API luna_tensor *luna_pack(luna_tensor *weights, luna_tensor *context, const int32_t *lengths, float dropout,
                                luna_tensor **sums) {
  int64_t sums_shape[3];
  bool failed = false;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_PACK, "luna_pack", 2, weights, context, NULL) || lunai_dropout_wrong(&s, dropout))
    return NULL;
  if (weights->rank != 3 || context->rank != 3 || weights->shape[0] != context->shape[0] ||
      weights->shape[2] != context->shape[2] || weights->shape[2] < 1 || weights->shape[2] > LUNAI_MAX_SCRATCH)
    return lunai_fail(weights->ctx, LUNA_ERROR_PACK_SHAPES, weights, context);
  if (!lunai_has_op(weights, LUNA_OP_PACK)) {
    luna_attention_config c;
    memset(&c, 0, sizeof c);
    c.lengths = lengths;
    c.scale = 1;
    c.dropout = dropout;
    c.sums = sums;
    return luna_softmax_attention(weights, context, context, &c);
  }
  s.op.lengths = lunai_integers(&s, lengths, context->shape[0], 0, context->shape[1], "lengths", &failed);
  if (failed) return lunai_abandon(&s);
  s.op.arg.attention.heads = sums_shape[2] = 1;
  s.op.arg.attention.batch = sums_shape[0] = weights->shape[0];
  s.op.arg.attention.queries = sums_shape[1] = weights->shape[1];
  s.op.arg.attention.keys = context->shape[1];
  s.op.arg.attention.scale = 1;
  s.op.dropout = dropout;
  return lunai_finish_two(&s, 3, weights->shape, sums, 3, sums_shape);
}

/* the same out of primitives, all heads' slots side by side: k, v [batch, h l, d], bias [batch, h l] */
LUNAI_FN luna_tensor *lunai_unpack_composed(luna_tensor *x, luna_tensor *k, luna_tensor *bias, luna_tensor *v,
                                            luna_tensor *out_bias, const int32_t *lengths, float dropout) {
  const int64_t batch = x->shape[0], n = x->shape[1], d = x->shape[2], h = k->shape[1], l = k->shape[2];
  const int swap[3] = { 1, 0, 2 }, heads_first[4] = { 0, 2, 1, 3 };
  int64_t flat[3], grouped[4], rows[2];
  luna_tensor *s;
  flat[0] = batch; flat[1] = h * l; flat[2] = d;
  grouped[0] = batch; grouped[1] = n; grouped[2] = h; grouped[3] = l;
  rows[0] = batch; rows[1] = h * l;
  s = luna_matmul(x, luna_reshape(k, 3, flat), false, true);
  s = luna_permute(luna_add(luna_permute(s, swap), luna_reshape(bias, 2, rows)), swap);
  s = luna_softmax(luna_reshape(s, 4, grouped), lengths);
  /* the fused op's order of elements */
  if (dropout > 0) s = luna_permute(luna_dropout(luna_permute(s, heads_first), dropout), heads_first);
  grouped[2] = h * l;
  s = luna_matmul(luna_reshape(s, 3, grouped), luna_reshape(v, 3, flat), false, false);
  return out_bias ? luna_add(s, out_bias) : s;
}

LUNAI_FN luna_tensor *lunai_unpack_with(luna_tensor *x, luna_tensor *k, luna_tensor *bias, luna_tensor *v,
    luna_tensor *out_bias, luna_tensor *residual, const int32_t *lengths, float dropout, float last_dropout) {
  bool good, failed = false;
  int a;
  lunai_build s;
  if (!lunai_start(&s, LUNA_OP_UNPACK, "luna_unpack", 3, x, k, bias) || lunai_dropout_wrong(&s, dropout)) return NULL;
  if (!v) return lunai_fail_null(x->ctx, "luna_unpack", "v");
  good = x->rank == 3 && k->rank == 4 && bias->rank == 3 && v->rank == 4 && k->shape[0] == x->shape[0] &&
      k->shape[3] == x->shape[2] && x->shape[2] > 0;
  for (a = 0; good && a < 4; a++) good = v->shape[a] == k->shape[a] && (a > 2 || bias->shape[a] == k->shape[a]);
  good = good && lunai_product(k->shape[1] * k->shape[2], x->shape[2], LUNAI_MAX_SCRATCH) > 0; /* at least one slot */
  good = good && lunai_checked(lunai_rows(x), k->shape[1]) >= 0;
  if (!good) return lunai_fail(x->ctx, LUNA_ERROR_UNPACK_SHAPES, x, k, bias, v);
  if (!lunai_is_vector(x->ctx, "luna_unpack", "out_bias", out_bias, x->shape[2])) return NULL;
  if (!lunai_has_op(x, LUNA_OP_UNPACK)) {
    x = luna_dropout(lunai_unpack_composed(x, k, bias, v, out_bias, lengths, dropout), last_dropout);
    return residual ? luna_add(residual, x) : x;
  }
  lunai_input(&s, v);
  lunai_input(&s, out_bias);
  lunai_input(&s, residual);
  s.op.last_dropout = last_dropout;
  s.op.lengths = lunai_integers(&s, lengths, x->shape[0], 0, INT32_MAX, "lengths", &failed);
  s.op.dropout = dropout;
  return failed ? lunai_abandon(&s) : lunai_finish_like(&s, x);
}
LUNA_API luna_tensor *luna_unpack(luna_tensor *x, luna_tensor *k, luna_tensor *bias, luna_tensor *v,
                                  luna_tensor *out_bias, const int32_t *lengths, float dropout) {
  return lunai_unpack_with(x, k, bias, v, out_bias, NULL, lengths, dropout, 0);
}

LUNAI_FN luna_tensor *lunai_causal_composed(luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_tensor *s,
                                            int64_t heads, luna_activation omega,
                                            const int32_t *lengths, float dropout, float scale) {
  luna_tensor *a = luna_activate(s, omega), *w;
  int64_t grouped[4];
  memcpy(grouped, s->shape, sizeof grouped);
  grouped[2] = heads;
  grouped[3] = s->shape[2] / heads;
  w = luna_causal_product(luna_scale(q, scale), k, a, heads);
  w = luna_dropout(luna_softmax(luna_reshape(w, 4, grouped), lengths), dropout);
  grouped[2] = s->shape[2];
  return luna_causal_product(luna_reshape(w, 3, grouped), a, v, heads);
}

LUNAI_FN luna_tensor *lunai_causal_nested(luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_tensor *s,
                                         int64_t heads, luna_activation omega, const int32_t *lengths, float dropout,
                                         const lunai_past *past) {
  bool good, failed = false;
  float scale;
  int a;
  lunai_build build;
  if (!lunai_start(&build, LUNA_OP_CAUSAL_LUNA, "luna_causal_nested_attention", 3, q, k, v) ||
      lunai_dropout_wrong(&build, dropout)) return NULL;
  if (!s) return lunai_fail_null(q->ctx, "luna_causal_nested_attention", "s");
  good = q->rank == 3 && k->rank == 3 && v->rank == 3 && s->rank == 3 && heads >= 1 && s->shape[0] == q->shape[0] &&
      s->shape[1] == q->shape[1];
  for (a = 0; good && a < 3; a++) good = q->shape[a] == k->shape[a] && q->shape[a] == v->shape[a];
  good = good && q->shape[2] > 0 && s->shape[2] > 0 && q->shape[2] % heads == 0 && s->shape[2] % heads == 0;
  good = good && lunai_causal_fits(q->shape[2] / heads, s->shape[2] / heads);
  if (!good && !lunai_is_checked(q->ctx)) /* a stream's source may have no slots */
    return lunai_fail(q->ctx, LUNA_ERROR_CAUSAL_NESTED_SHAPES, q, k, v, s, heads);
  if (omega != LUNA_ACTIVATION_SOFTPLUS2 && omega != LUNA_ACTIVATION_SOFTPLUS && omega != LUNA_ACTIVATION_ELU1 &&
      !lunai_is_checked(q->ctx))
    return lunai_fail(q->ctx, LUNA_ERROR_OMEGA, "luna_causal_nested_attention", (int64_t)omega);
  scale = (float)(1.0 / sqrt((double)(q->shape[2] / heads)));
  if (!LUNAI_BUMPS(q->ctx) && (!lunai_has_op(q, LUNA_OP_CAUSAL_LUNA) || (dropout > 0 && q->ctx->training)))
    return lunai_causal_composed(q, k, v, s, heads, omega, lengths, dropout, scale);
  lunai_input(&build, s);
  build.op.lengths = lunai_integers(&build, lengths, q->shape[0], 0, INT32_MAX, "lengths", &failed);
  build.op.arg.causal.heads = heads;
  build.op.arg.causal.scale = scale;
  build.op.activation = omega;
  if (past) {
    build.op.mean_ka = past->mean_ka;
    build.op.mean_av = past->mean_av;
    build.op.position = past->position;
  }
  return failed ? lunai_abandon(&build) : lunai_finish_like(&build, q);
}
LUNA_API luna_tensor *luna_causal_nested_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v, luna_tensor *s,
    int64_t heads, luna_activation omega, const int32_t *lengths, float dropout) {
  return lunai_causal_nested(q, k, v, s, heads, omega, lengths, dropout, NULL);
}

LUNA_API luna_tensor *luna_custom_op(luna_tensor *const *in, int count, int rank, const int64_t *shape,
                                     const luna_custom *custom) {
  void *memory;
  int i;
  lunai_build s;
  if (!lunai_all(in, count, "luna_custom_op") || !lunai_start(&s, LUNA_OP_CUSTOM, "luna_custom_op", 1, in[0], NULL,
                                                              NULL)) return NULL;
  if (!custom || !custom->forward || !custom->backward || (custom->state_size && !custom->state))
    return lunai_fail_null(in[0]->ctx, "luna_custom_op", !custom ? "custom" : !custom->forward ? "custom->forward" :
                           !custom->backward ? "custom->backward" : "custom->state");
  for (i = 1; i < count; i++) lunai_input(&s, in[i]);
  if (!lunai_step(in[0]->ctx, custom->state_size, false, &memory))
    return lunai_op_no_memory(&s, custom->state_size);
  if (custom->state_size) memcpy(memory, custom->state, custom->state_size);
  s.op.custom = *custom;
  s.op.custom.state = memory;
  return lunai_finish(&s, rank, shape);
}
LUNA_API luna_run luna_custom_run(const luna_tensor *out) {
  const luna_op *op = out ? out->ctx->custom : NULL;
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

/* ---------------------------------------------------------------------------------------------------------------------
   >>layers. Guarded by tests/golden.c (the authors' outputs and gradients) and tests/gradients.c.
   ------------------------------------------------------------------------------------------------------------------ */
#define LUNAI_MAX_NAME 192
/* prefix + name as one parameter name; false when too long */
LUNAI_FN bool lunai_name(luna_params *params, char out[LUNAI_MAX_NAME], const char *prefix, const char *name) {
  const size_t a = prefix ? strlen(prefix) : 0, b = strlen(name);
  if (a + b >= LUNAI_MAX_NAME) {
    lunai_fail_status(params->ctx, LUNA_ERROR_NAME_LENGTH, params->ctx->call, (int64_t)(a + b),
                      (int64_t)LUNAI_MAX_NAME - 1, prefix ? prefix : "", name);
    return false;
  }
  if (a) memcpy(out, prefix, a);
  memcpy(out + a, name, b + 1);
  return true;
}
LUNAI_FN luna_init lunai_init(luna_init_kind kind, float scale) {
  luna_init init;
  init.kind = kind;
  init.scale = scale;
  return init;
}
LUNAI_FN luna_tensor *lunai_named(luna_params *params, const char *prefix, const char *name, int rank, int64_t a,
                                  int64_t b, luna_init init) {
  char full[LUNAI_MAX_NAME];
  int64_t shape[2];
  shape[0] = a;
  shape[1] = b;
  return lunai_name(params, full, prefix, name) ? luna_param(params, full, rank, shape, init) : NULL;
}

/* "prefix" + "name" + ".weight" and ".bias" */
LUNAI_FN bool lunai_linear_init(luna_linear_layer *layer, luna_params *params, const char *prefix, const char *name,
                                int64_t in, int64_t out, luna_init init) {
  char full[LUNAI_MAX_NAME];
  if (!lunai_name(params, full, prefix, name)) return false;
  layer->weight = lunai_named(params, full, ".weight", 2, out, in, init);
  layer->bias = layer->weight ? lunai_named(params, full, ".bias", 1, out, 1, lunai_init(LUNA_INIT_ZEROS, 0)) : NULL;
  return layer->bias != NULL;
}
LUNAI_FN bool lunai_norm_init(luna_norm_layer *layer, luna_params *params, const char *prefix, const char *name,
                              int64_t dim) {
  char full[LUNAI_MAX_NAME];
  if (!lunai_name(params, full, prefix, name)) return false;
  layer->weight = lunai_named(params, full, ".weight", 1, dim, 1, lunai_init(LUNA_INIT_ONES, 0));
  layer->bias = layer->weight ? lunai_named(params, full, ".bias", 1, dim, 1, lunai_init(LUNA_INIT_ZEROS, 0)) : NULL;
  return layer->bias != NULL;
}
/* "layers.0.fc1." and "layers.0.fc1" name the same layer */
LUNAI_FN const char *lunai_undotted(const char *prefix, char out[LUNAI_MAX_NAME]) {
  const size_t size = prefix ? strlen(prefix) : 0;
  if (size == 0 || size >= LUNAI_MAX_NAME) return prefix ? prefix : "";
  memcpy(out, prefix, size + 1);
  if (out[size - 1] == '.') out[size - 1] = 0;
  return out;
}

/* whether a forward has its input and a layer whose init succeeded; `made`: a tensor that every such layer has */
LUNAI_FN bool lunai_layer_made(const luna_tensor *x, const luna_tensor *made, const char *name) {
  if (x && !made)
    lunai_fail(x->ctx, LUNA_ERROR_NOT_INITIALIZED, name);
  if (made && !x) lunai_fail_null(made->ctx, name, "the input");
  return x && made;
}

LUNA_API luna_status luna_linear_layer_init(luna_linear_layer *layer, luna_params *params, const char *prefix,
                                            int64_t in, int64_t out, luna_init init) {
  char name[LUNAI_MAX_NAME];
  lunai_setup s;
  const bool good = lunai_setup_begin(&s, "luna_linear_layer_init", params, prefix, layer, sizeof *layer);
  return lunai_setup_end(&s, good && lunai_linear_init(layer, params, lunai_undotted(prefix, name), "", in, out, init));
}
LUNA_API luna_tensor *luna_linear_layer_forward(const luna_linear_layer *layer, luna_tensor *x) {
  if (!lunai_layer_made(x, layer ? layer->weight : NULL, "luna_linear_layer_forward")) return NULL;
  return luna_linear(x, layer->weight, layer->bias);
}

LUNA_API luna_status luna_norm_layer_init(luna_norm_layer *layer, luna_params *params, const char *prefix,
                                          int64_t dim) {
  char name[LUNAI_MAX_NAME];
  lunai_setup s;
  const bool good = lunai_setup_begin(&s, "luna_norm_layer_init", params, prefix, layer, sizeof *layer);
  return lunai_setup_end(&s, good && lunai_norm_init(layer, params, lunai_undotted(prefix, name), "", dim));
}
LUNA_API luna_tensor *luna_norm_layer_forward(const luna_norm_layer *layer, luna_tensor *x) {
  if (!lunai_layer_made(x, layer ? layer->weight : NULL, "luna_norm_layer_forward")) return NULL;
  return luna_layer_norm(x, layer->weight, layer->bias);
}

/* --- features --- */
LUNAI_FN bool lunai_input_init(luna_input_layer *layer, luna_params *params, const char *prefix, int64_t features,
                               int64_t dim, luna_init init) {
  const luna_init zeros = lunai_init(LUNA_INIT_ZEROS, 0), ones = lunai_init(LUNA_INIT_ONES, 0);
  return (layer->mean = lunai_named(params, prefix, "input_norm.mean", 1, features, 1, zeros)) != NULL &&
         (layer->scale = lunai_named(params, prefix, "input_norm.scale", 1, features, 1, ones)) != NULL &&
         lunai_linear_init(&layer->projection, params, prefix, "input_proj", features, dim, init);
}
LUNA_API luna_status luna_input_layer_init(luna_input_layer *layer, luna_params *params, const char *prefix,
                                           int64_t features, int64_t dim, luna_init init) {
  lunai_setup s;
  const bool good = lunai_setup_begin(&s, "luna_input_layer_init", params, prefix, layer, sizeof *layer);
  return lunai_setup_end(&s, good && lunai_input_init(layer, params, prefix, features, dim, init));
}
/* Whether an input has features and lengths that go together. False: the failure is reported, an op's, or of a call
   that returns a status. */
LUNAI_FN bool lunai_input_wrong(luna_ctx *ctx, bool op, int id, ...) {
  va_list values;
  va_start(values, id);
  lunai_report_values(ctx, !op, id, values);
  va_end(values);
  return false;
}
LUNAI_FN bool lunai_input_fits(const luna_input_layer *layer, const luna_input *input, bool op, const char *name) {
  luna_ctx *ctx = layer && layer->mean ? layer->mean->ctx : NULL;
  int64_t shape[3], b;
  luna_tensor like;
  if (!ctx) return false;
  if (!input) return lunai_input_wrong(ctx, op, LUNA_ERROR_NULL_ARGUMENT, name, "the input");
  shape[0] = input->batch;
  shape[1] = input->n;
  shape[2] = layer->mean->shape[0];
  like = lunai_like(ctx, 3, shape);
  if (lunai_shape_count(3, shape) < 0)
    return lunai_input_wrong(ctx, op, LUNA_ERROR_SHAPE, name, "the shape", &like, (int64_t)3, LUNAI_MAX_COUNT);
  if (!input->features && lunai_shape_count(3, shape) > 0)
    return lunai_input_wrong(ctx, op, LUNA_ERROR_NULL_ARGUMENT, name, "input.features");
  for (b = 0; input->lengths && b < input->batch; b++)
    if (input->lengths[b] < 0 || input->lengths[b] > input->n)
      return lunai_input_wrong(ctx, op, LUNA_ERROR_ELEMENT_RANGE, name, "lengths", b, (int64_t)input->lengths[b],
                               (int64_t)0, input->n);
  return true;
}
LUNAI_FN bool lunai_is_real(const luna_input *input, int64_t step) {
  return !input->lengths || step % input->n < input->lengths[step / input->n];
}
LUNA_API luna_status luna_input_layer_fit(luna_input_layer *layer, const luna_input *input) {
  const int64_t k = layer && layer->mean ? layer->mean->shape[0] : 0;
  luna_ctx *ctx = k ? layer->mean->ctx : NULL;
  luna_status status;
  lunai_mark mark;
  void *memory;
  float *mean;
  int64_t i, f;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (!lunai_input_fits(layer, input, false, "luna_input_layer_fit")) return ctx->last_status;
  mark = lunai_step_mark(ctx);
  if (!lunai_step(ctx, (size_t)(2 * k) * sizeof(float), false, &memory))
    return lunai_fail_memory(ctx, "luna_input_layer_fit", (size_t)(2 * k) * sizeof(float));
  mean = (float *)memory;
  for (f = 0; f < k; f++) {
    double sum = 0, squares = 0;
    int64_t count = 0;
    for (i = 0; i < input->batch * input->n; i++) /* Welford's recurrence: one pass, no difference of large sums */
      if (lunai_is_real(input, i) && lunai_is_finite(input->features[i * k + f])) {
        const double x = (double)input->features[i * k + f], from = x - sum;
        sum += from / (double)++count;
        squares += from * (x - sum);
      }
    mean[f] = (float)sum;
    mean[k + f] = squares > 0 ? (float)sqrt((double)count / squares) : 1.0f;
    if (!lunai_is_finite(mean[k + f]) || mean[k + f] == 0) mean[k + f] = 1;
  }
  status = luna_write(layer->mean, mean);
  if (status == LUNA_OK) status = luna_write(layer->scale, mean + k);
  lunai_step_rewind(ctx, mark);
  return status;
}
/* [batch, n, k]: the features with 0 for what is missing, or 1 where one is there and 0 where not. Both always, so that
   neither memory nor the ops of a step depend on the data. */
LUNAI_FN luna_tensor *lunai_features_of(luna_ctx *ctx, const luna_input *input, int64_t k, bool present) {
  int64_t shape[3], i, f;
  luna_tensor *out;
  lunai_mark mark;
  luna_status status = LUNA_OK;
  void *memory;
  shape[0] = input->batch;
  shape[1] = input->n;
  shape[2] = k;
  if ((out = luna_tensor_new(ctx, NULL, 3, shape)) == NULL) return NULL;
  mark = lunai_step_mark(ctx);
  if (!lunai_step(ctx, (size_t)luna_count(out) * sizeof(float), false, &memory))
    return lunai_fail_op_memory(ctx, "luna_input_layer_forward", (size_t)luna_count(out) * sizeof(float));
  if (lunai_computes(ctx) && luna_count(out) > 0) {
    float *to = (float *)memory;
    for (i = 0; i < input->batch * input->n; i++) {
      const bool real = lunai_is_real(input, i);
      for (f = 0; f < k; f++, to++) {
        const float x = real ? input->features[i * k + f] : 0;
        *to = x != x || !real ? 0 : present ? 1 : x;
      }
    }
    status = ctx->backend->copy(ctx, out->data, memory, (size_t)luna_count(out) * sizeof(float), 1);
  }
  lunai_step_rewind(ctx, mark);
  return status == LUNA_OK ? out : lunai_fail_backend(ctx, false, "luna_input_layer_forward", status);
}
LUNA_API luna_tensor *luna_input_layer_forward(const luna_input_layer *layer, const luna_input *input) {
  luna_scope scope;
  luna_tensor *x, *present;
  if (!lunai_input_fits(layer, input, true, "luna_input_layer_forward")) return NULL;
  scope = luna_scope_begin(layer->mean->ctx);
  x = lunai_features_of(scope.ctx, input, layer->mean->shape[0], false);
  present = lunai_features_of(scope.ctx, input, layer->mean->shape[0], true);
  x = luna_add(x, luna_scale(luna_detach(layer->mean), -1));
  x = luna_mul(luna_mul(x, luna_detach(layer->scale)), present);
  return lunai_result(scope, luna_linear_layer_forward(&layer->projection, x));
}

/* what every config's dim and heads are by default */
LUNAI_FN void lunai_default_sizes(int64_t *dim, int64_t *heads) {
  if (*dim == 0) *dim = 128;
  if (*heads == 0) *heads = 4;
}

/* --- Luna attention, eqs. 3-5 --- */
LUNAI_FN bool lunai_divides(luna_ctx *ctx, const char *field, int64_t heads, int64_t dim) {
  if (heads >= 1 && dim % heads == 0) return true;
  return lunai_fail_status(ctx, LUNA_ERROR_HEADS, ctx->call, dim, field, heads) == LUNA_OK;
}
/* what all attentions' configs have */
LUNAI_FN bool lunai_attention_good(luna_ctx *ctx, int64_t dim, int64_t heads, float dropout) {
  return lunai_in(ctx, ctx->call, "dim", dim, 1, 1 << 24) && lunai_divides(ctx, "heads", heads, dim) &&
         lunai_is_probability(ctx, ctx->call, "dropout", dropout);
}
/* whether t is [batch, n, dim] */
LUNAI_FN bool lunai_is_sequence(const char *name, const char *what, const luna_tensor *t, int64_t batch, int64_t dim) {
  if (t->rank == 3 && t->shape[0] == batch && t->shape[2] == dim) return true;
  return lunai_fail(t->ctx, LUNA_ERROR_SEQUENCE_SHAPE, name, what, t, batch, dim) != NULL;
}
LUNAI_FN luna_init lunai_projection_init(bool bert, bool output) {
  if (bert) return lunai_init(LUNA_INIT_NORMAL, 0.02f);
  return lunai_init(LUNA_INIT_XAVIER, output ? 1.0f : 0.70710678f);
}

LUNA_API luna_status luna_nested_attention_layer_init(luna_nested_attention_layer *layer, luna_params *params,
                                                      const char *prefix,
                                                      const luna_nested_attention_layer_config *config) {
  luna_nested_attention_layer_config c;
  const luna_linear_layer none = { NULL, NULL };
  luna_init init;
  lunai_setup s;
  bool good;
  if (!lunai_setup_begin(&s, "luna_nested_attention_layer_init", params, prefix, layer, sizeof *layer))
    return lunai_setup_end(&s, false);
  if (config) c = *config;
  else memset(&c, 0, sizeof c);
  lunai_default_sizes(&c.dim, &c.heads);
  if (c.pack_heads == 0) c.pack_heads = c.heads;
  if (!lunai_attention_good(params->ctx, c.dim, c.heads, c.dropout) ||
      !lunai_divides(params->ctx, "pack_heads", c.pack_heads, c.dim) ||
      !lunai_in(params->ctx, params->ctx->call, "sharing", (int64_t)c.sharing, 0, LUNA_SHARING_QK))
    return lunai_setup_end(&s, false);
  init = lunai_projection_init(c.bert_init, false);
  good = lunai_linear_init(&layer->pq, params, prefix, "pq_proj", c.dim, c.dim, init);
  layer->pk = layer->k = none;
  if (c.sharing == LUNA_SHARING_FULL)
    good = good && lunai_linear_init(&layer->pk, params, prefix, "pk_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->pv, params, prefix, c.sharing == LUNA_SHARING_TIED ? "pc_proj" : "pv_proj",
                                   c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->q, params, prefix, "q_proj", c.dim, c.dim, init);
  if (c.sharing == LUNA_SHARING_FULL)
    good = good && lunai_linear_init(&layer->k, params, prefix, "k_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->v, params, prefix, c.sharing == LUNA_SHARING_TIED ? "c_proj" : "v_proj",
                                   c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->out, params, prefix, "out_proj", c.dim, c.dim,
                                   lunai_projection_init(c.bert_init, true));
  if (c.sharing == LUNA_SHARING_TIED) { layer->pk = layer->pv; layer->k = layer->v; }
  if (c.sharing == LUNA_SHARING_QK) { layer->pk = layer->pq; layer->k = layer->q; }
  layer->config = c;
  return lunai_setup_end(&s, good);
}

LUNAI_FN luna_tensor *lunai_reshape(luna_tensor *x, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t shape[4];
  shape[0] = a; shape[1] = b; shape[2] = c; shape[3] = d;
  return luna_reshape(x, rank, shape);
}
LUNAI_FN luna_tensor *lunai_permute(luna_tensor *x, int a, int b, int c, int d) {
  int axes[4];
  axes[0] = a; axes[1] = b; axes[2] = c; axes[3] = d;
  return luna_permute(x, axes);
}
/* [batch, n, h d_h] -> [batch, h, n, d_h], and back; of one row that is the same order */
LUNAI_FN luna_tensor *lunai_split_heads(luna_tensor *x, int64_t heads) {
  if (x && x->shape[1] == 1) return lunai_reshape(x, 4, x->shape[0], heads, 1, x->shape[2] / heads);
  return x ? lunai_permute(lunai_reshape(x, 4, x->shape[0], x->shape[1], heads, x->shape[2] / heads), 0, 2, 1, 3) :
      NULL;
}
LUNAI_FN luna_tensor *lunai_merge_heads(luna_tensor *x) {
  if (x && x->shape[2] == 1) return lunai_reshape(x, 3, x->shape[0], 1, x->shape[1] * x->shape[3], 1);
  return x ? lunai_reshape(lunai_permute(x, 0, 2, 1, 3), 3, x->shape[0], x->shape[2], x->shape[1] * x->shape[3], 1) :
      NULL;
}
/* the weight of a projection by heads, [h, d_h, d]; of no projection, the identity */
LUNAI_FN luna_tensor *lunai_weight_heads(luna_ctx *ctx, const luna_linear_layer *layer, int64_t dim, int64_t heads) {
  const float one = 1;
  int64_t shape[2], i;
  luna_tensor *w = layer->weight;
  luna_status status = LUNA_OK;
  shape[0] = shape[1] = dim;
  if (!w) w = luna_tensor_new(ctx, NULL, 2, shape);
  for (i = 0; w && !layer->weight && lunai_computes(ctx) && i < dim && status == LUNA_OK; i++)
    status = ctx->backend->copy(ctx, w->data + i * dim + i, &one, sizeof one, 1);
  if (status != LUNA_OK) return lunai_fail_backend(ctx, false, "luna_nested_attention_layer_forward", status);
  return lunai_reshape(w, 3, heads, dim / heads, dim, 1);
}

LUNAI_FN luna_tensor *lunai_project(const luna_linear_layer *layer, luna_tensor *x) {
  return layer->weight ? luna_linear_layer_forward(layer, x) : x;
}

/* lengths of a memory of `max` slots, in the step, on the host */
LUNAI_FN const int32_t *lunai_memory_lengths(luna_ctx *ctx, const int32_t *lengths, int64_t count, int64_t max,
                                             bool *failed) {
  void *memory;
  int64_t i;
  if (!lengths) return NULL;
  *failed = !lunai_step(ctx, (size_t)count * sizeof(int32_t), false, &memory);
  if (*failed) lunai_fail_op_memory(ctx, "lengths", (size_t)count * sizeof(int32_t));
  for (i = 0; i < count && !*failed; i++) ((int32_t *)memory)[i] = (int32_t)lunai_min(lengths[i], max);
  return (const int32_t *)memory;
}

/* Folded pack: weights G_h = scale pq_h Wpk_h (the key bias cancels), Z = softmax(G C^T) C, Y_P,h = Z_h Wpv_h^T + r_h
   bpv_h */
LUNAI_FN luna_tensor *lunai_pack_folded(const luna_nested_attention_layer *layer, luna_tensor *pq, luna_tensor *context,
                                        const int32_t *lengths) {
  const int64_t d = layer->config.dim, h = layer->config.pack_heads, b = pq ? pq->shape[0] : 0,
      l = pq ? pq->shape[1] : 0;
  luna_tensor *sums = NULL, *g, *z, *bias;
  if (!pq) return NULL;
  g = luna_matmul(lunai_split_heads(luna_scale(pq, (float)(1.0 / sqrt((double)(d / h)))), h),
                  lunai_weight_heads(pq->ctx, &layer->pk, d, h), false, false);
  z = luna_pack(lunai_reshape(g, 3, b, h * l, d, 1), context, lengths, layer->config.dropout, &sums);
  z = luna_matmul(lunai_reshape(z, 4, b, h, l, d), lunai_weight_heads(pq->ctx, &layer->pv, d, h), false, true);
  bias = luna_matmul(lunai_reshape(sums, 4, b, h, l, 1), lunai_reshape(layer->pv.bias, 3, h, 1, d / h, 1), false,
                     false);
  return lunai_merge_heads(luna_add(z, bias));
}

/* Folded unpack: K'_h = scale k_h Wq_h with bias scale k_h bq_h, V'_h = v_h Wo_h^T */
LUNAI_FN luna_tensor *lunai_unpack_folded(const luna_nested_attention_layer *layer, luna_tensor *x,
                                          luna_tensor *packed_context, luna_tensor *residual, float dropout,
                                          const int32_t *lengths) {
  const int64_t d = layer->config.dim, h = layer->config.heads;
  const int64_t b = packed_context->shape[0], l = packed_context->shape[1];
  luna_tensor *k = lunai_split_heads(luna_scale(lunai_project(&layer->k, packed_context),
                                                (float)(1.0 / sqrt((double)(d / h)))), h);
  luna_tensor *v = lunai_split_heads(luna_linear_layer_forward(&layer->v, packed_context), h);
  luna_tensor *bias = luna_matmul(k, lunai_reshape(layer->q.bias, 3, h, d / h, 1, 1), false, false);
  luna_tensor *out = lunai_reshape(lunai_permute(layer->out.weight, 1, 0, 2, 3), 3, h, d / h, d, 1);
  k = luna_matmul(k, lunai_weight_heads(x->ctx, &layer->q, d, h), false, false);
  return lunai_unpack_with(x, k, lunai_reshape(bias, 3, b, h, l, 1), luna_matmul(v, out, false, false), layer->out.bias,
                           residual, lengths, layer->config.dropout, dropout);
}

/* Whether the folded form has fewer flops: 4 h l d a row and 4 l d d a sequence, against 2 d d for each projection of
   the long side and 4 l d */
LUNAI_FN bool lunai_fold(luna_ctx *ctx, int64_t rows, int64_t dim, int64_t heads, int64_t slots, int64_t projections) {
  const double d = (double)dim, l = (double)slots, n = (double)rows;
  if (ctx->options.form != LUNA_FORM_CHEAPEST) return ctx->options.form == LUNA_FORM_FOLDED;
  return n * 4 * (double)heads * l * d + 4 * l * d * d < n * (2 * (double)projections * d * d + 4 * l * d);
}

/* the first half: Y_P */
LUNAI_FN luna_tensor *lunai_nested_pack(const luna_nested_attention_layer *layer, luna_tensor *p, luna_tensor *context,
                                        const int32_t *lengths) {
  const luna_nested_attention_layer_config *c = &layer->config;
  const int key = c->sharing == LUNA_SHARING_FULL || c->sharing == LUNA_SHARING_QK;
  luna_tensor *pq = luna_linear_layer_forward(&layer->pq, p), *pv;
  luna_attention_config a;
  if (lunai_fold(p->ctx, context->shape[1], c->dim, c->pack_heads, p->shape[1], 1 + key))
    return lunai_pack_folded(layer, pq, context, lengths);
  memset(&a, 0, sizeof a);
  a.dropout = c->dropout;
  a.heads = c->pack_heads;
  a.lengths = lengths;
  pv = luna_linear_layer_forward(&layer->pv, context);
  return luna_softmax_attention(pq, c->sharing == LUNA_SHARING_TIED ? pv : lunai_project(&layer->pk, context), pv, &a);
}

/* the second half of a stream's: its sources' sequences are queries side by side */
LUNAI_FN luna_tensor *lunai_unpack_past(const luna_nested_attention_layer *layer, luna_tensor *x,
                                        luna_tensor *residual, lunai_past *past) {
  luna_attention_config a;
  luna_tensor *q = luna_linear_layer_forward(&layer->q, x);
  memset(&a, 0, sizeof a);
  a.heads = layer->config.heads;
  a.lengths = past->source_slots;
  q = q ? lunai_reshape(q, 3, past->sources, x->shape[0] * x->shape[1] / past->sources, x->shape[2], 1) : NULL;
  q = luna_softmax_attention(q, &past->keys, &past->values, &a);
  q = q ? luna_reshape(q, x->rank, x->shape) : NULL;
  return lunai_linear_with(q, layer->out.weight, layer->out.bias, LUNA_ACTIVATION_NONE, residual, 0);
}
/* the second half: Y_X + residual, or null, after a dropout */
LUNAI_FN luna_tensor *lunai_nested_unpack(const luna_nested_attention_layer *layer, luna_tensor *x, luna_tensor *y_p,
                                          luna_tensor *residual, float dropout, const int32_t *lengths) {
  const luna_nested_attention_layer_config *c = &layer->config;
  luna_attention_config a;
  luna_tensor *k, *v;
  bool failed = false;
  if (!y_p) return NULL;
  lengths = lunai_memory_lengths(x->ctx, lengths, x->shape[0], y_p->shape[1], &failed);
  if (failed) return NULL;
  if (lunai_fold(x->ctx, x->shape[1], c->dim, c->heads, y_p->shape[1], 2))
    return lunai_unpack_folded(layer, x, y_p, residual, dropout, lengths);
  memset(&a, 0, sizeof a);
  a.dropout = c->dropout;
  a.heads = c->heads;
  a.lengths = lengths;
  v = luna_linear_layer_forward(&layer->v, y_p);
  k = c->sharing == LUNA_SHARING_TIED ? v : lunai_project(&layer->k, y_p);
  return lunai_linear_with(luna_softmax_attention(luna_linear_layer_forward(&layer->q, x), k, v, &a), layer->out.weight,
                           layer->out.bias, LUNA_ACTIVATION_NONE, residual, dropout);
}

/* *y: Y_X + residual, or null, after a dropout; *packed_context: Y_P. Either is null where its result is not wanted. */
LUNAI_FN bool lunai_nested_attention(const luna_nested_attention_layer *layer, luna_tensor *x, luna_tensor *p,
                                     luna_tensor *context, luna_tensor *residual, float dropout, const int32_t *lengths,
                                     luna_tensor **y, luna_tensor **packed_context) {
  static const char name[] = "luna_nested_attention_layer_forward";
  luna_tensor *y_x = NULL, *y_p;
  luna_scope scope;
  int64_t batch, d;
  if (!context) context = x;
  if (!lunai_layer_made(x, layer ? layer->pq.weight : NULL, name)) return false;
  if (!p) return lunai_fail_null(x->ctx, name, "p") != NULL;
  batch = x->shape[0];
  d = layer->config.dim;
  if (!lunai_is_sequence(name, "x", x, batch, d) || !lunai_is_sequence(name, "p", p, batch, d) ||
      !lunai_is_sequence(name, "context", context, batch, d)) return false;
  scope = luna_scope_begin(x->ctx);
  y_p = lunai_nested_pack(layer, p, context, lengths);
  if (y) y_x = lunai_nested_unpack(layer, x, y_p, residual, dropout, lengths);
  (void)lunai_results(scope, y_p, y_x);
  if (packed_context) *packed_context = y_p;
  if (y) *y = y_x;
  return y_p && (!y || y_x);
}
LUNA_API luna_tensor *luna_nested_attention_layer_forward(const luna_nested_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, luna_tensor *context, const int32_t *lengths,
                                                          luna_tensor **packed_context) {
  luna_tensor *y = NULL, *y_p = NULL;
  if (!lunai_nested_attention(layer, x, p, context, NULL, 0, lengths, &y, &y_p)) return NULL;
  if (packed_context) *packed_context = y_p;
  return y;
}

/* --- causal Luna attention, section 3.3 --- */
LUNAI_FN bool lunai_is_omega(luna_ctx *ctx, luna_activation a) {
  return a == LUNA_ACTIVATION_SOFTPLUS2 || a == LUNA_ACTIVATION_SOFTPLUS || a == LUNA_ACTIVATION_ELU1 ||
         lunai_fail_status(ctx, LUNA_ERROR_OMEGA, ctx->call, (int64_t)a) == LUNA_OK;
}
LUNA_API luna_status luna_causal_attention_layer_init(luna_causal_attention_layer *layer, luna_params *params,
                                                      const char *prefix,
                                                      const luna_causal_attention_layer_config *config) {
  luna_causal_attention_layer_config c;
  luna_init init;
  lunai_setup s;
  bool good;
  if (!lunai_setup_begin(&s, "luna_causal_attention_layer_init", params, prefix, layer, sizeof *layer))
    return lunai_setup_end(&s, false);
  if (config) c = *config;
  else memset(&c, 0, sizeof c);
  lunai_default_sizes(&c.dim, &c.heads);
  if (c.omega == LUNA_ACTIVATION_NONE) c.omega = LUNA_ACTIVATION_SOFTPLUS2;
  if (!lunai_attention_good(params->ctx, c.dim, c.heads, c.dropout) ||
      !lunai_in(params->ctx, params->ctx->call, "sharing", (int64_t)c.sharing, 0, LUNA_SHARING_FULL))
    return lunai_setup_end(&s, false);
  if (!lunai_is_omega(params->ctx, c.omega)) return lunai_setup_end(&s, false);
  init = lunai_projection_init(c.bert_init, false);
  good = lunai_linear_init(&layer->pq, params, prefix, "pq_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->pc, params, prefix, "pc_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->q, params, prefix, "q_proj", c.dim, c.dim, init);
  if (c.sharing == LUNA_SHARING_FULL)
    good = good && lunai_linear_init(&layer->k, params, prefix, "k_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->v, params, prefix, c.sharing == LUNA_SHARING_TIED ? "c_proj" : "v_proj",
                                   c.dim, c.dim, init);
  if (c.sharing == LUNA_SHARING_TIED) layer->k = layer->v;
  good = good && lunai_linear_init(&layer->out, params, prefix, "out_proj", c.dim, c.dim,
                                   lunai_projection_init(c.bert_init, true));
  layer->config = c;
  return lunai_setup_end(&s, good);
}

/* pq = (P Wpq + bpq) / sqrt(d_h) of p [b, l, d] or [l, d] -> [b, h, l, d_h] */
LUNAI_FN luna_tensor *lunai_causal_queries(const luna_causal_attention_layer *layer, luna_tensor *p) {
  const int64_t d = layer->config.dim, h = layer->config.heads;
  luna_tensor *pq = luna_scale(luna_linear_layer_forward(&layer->pq, p), (float)(1.0 / sqrt((double)(d / h))));
  return lunai_split_heads(lunai_reshape(pq, 3, p->rank == 2 ? 1 : p->shape[0], p->shape[p->rank - 2], d, 1), h);
}
/* folded: pq_h Wpc_h [b, h, l, d]; *bias, unless null: pq_h bpc_h [b, h, l, 1] */
LUNAI_FN luna_tensor *lunai_causal_folded(const luna_causal_attention_layer *layer, luna_tensor *pq,
                                          luna_tensor **bias) {
  const int64_t d = layer->config.dim, h = layer->config.heads;
  luna_tensor *g = luna_matmul(pq, lunai_reshape(layer->pc.weight, 3, h, d / h, d, 1), false, false);
  if (bias) *bias = luna_matmul(pq, lunai_reshape(layer->pc.bias, 3, h, d / h, 1, 1), false, false);
  return g;
}
/* Raw pack scores s [batch, n, h l] = k_p pq^T, k_p = X Wpc + bpc. Folded: X (pq_h Wpc_h)^T + pq_h bpc_h; here the key
   bias stays, for omega is no softmax. */
LUNAI_FN luna_tensor *lunai_scores_past(const luna_causal_attention_layer *layer, luna_tensor *x, lunai_past *past) {
  const int64_t h = layer->config.heads, n = LUNAI_SOURCES(past), rows = x->shape[0] * x->shape[1];
  const luna_scope scope = luna_scope_begin(x->ctx);
  const bool split = n > 1 || x->shape[0] > 1;
  luna_tensor *s = split ? lunai_reshape(x, 3, n, rows / n, x->shape[2], 1) : x;
  if (past->scores_bias.rank == 0) {
    s = lunai_split_heads(luna_linear_layer_forward(&layer->pc, s), h);
    s = lunai_merge_heads(luna_matmul(s, &past->scores, false, true));
  } else if (n == 1) s = luna_linear(s, &past->scores, &past->scores_bias);
  else s = luna_add(lunai_matmul_by(s, &past->scores, false, true, lunai_is_single_row(x)), &past->scores_bias);
  if (s && split) s = lunai_reshape(s, 3, x->shape[0], x->shape[1], s->shape[2], 1);
  return lunai_result(scope, s);
}
LUNAI_FN luna_tensor *lunai_causal_scores(const luna_causal_attention_layer *layer, luna_tensor *x, luna_tensor *p) {
  const int64_t d = layer->config.dim, h = layer->config.heads, l = p->shape[p->rank - 2], shared = p->rank == 2 ||
      p->shape[0] == 1;
  const int64_t b = shared ? 1 : p->shape[0];
  luna_tensor *pq = lunai_causal_queries(layer, p), *g, *bias;
  if (!lunai_fold(x->ctx, x->shape[1] * (shared ? x->shape[0] : 1), d, h, l, 1)) {
    luna_tensor *k = lunai_split_heads(luna_linear_layer_forward(&layer->pc, x), h);
    if (shared && pq) pq = lunai_reshape(pq, 3, h, l, d / h, 1);
    return lunai_merge_heads(luna_matmul(k, pq, false, true));
  }
  g = lunai_causal_folded(layer, pq, &bias);
  if (shared) return luna_linear(x, lunai_reshape(g, 2, h * l, d, 1, 1), lunai_reshape(bias, 1, h * l, 1, 1, 1));
  g = luna_matmul(x, lunai_reshape(g, 3, b, h * l, d, 1), false, true);
  return lunai_permute(luna_add(lunai_permute(g, 1, 0, 2, 3), lunai_reshape(bias, 2, b, h * l, 1, 1)), 1, 0, 2, 3);
}

/* past: of a stream's layer, in place of p and lengths; or null */
LUNAI_FN luna_tensor *lunai_causal_attention(const luna_causal_attention_layer *layer, luna_tensor *x, luna_tensor *p,
                                             luna_tensor *residual, float dropout, const int32_t *lengths,
                                             lunai_past *past) {
  const luna_causal_attention_layer_config *c;
  luna_tensor *s, *q, *k, *v;
  luna_scope scope;
  bool failed = false;
  if (!lunai_layer_made(x, layer ? layer->pq.weight : NULL, "luna_causal_attention_layer_forward")) return NULL;
  c = &layer->config;
  if (!p && !LUNAI_BUMPS(x->ctx)) return lunai_fail_null(x->ctx, "luna_causal_attention_layer_forward", "p");
  if (!lunai_is_sequence("luna_causal_attention_layer_forward", "x", x, x->shape[0], c->dim)) return NULL;
  if (LUNAI_BUMPS(x->ctx)) lengths = past->slots;
  else if (p->rank < 2 || p->rank > 3 || lunai_last(p) != c->dim ||
      (p->rank == 3 && p->shape[0] != x->shape[0] && p->shape[0] != 1))
    return lunai_fail(x->ctx, LUNA_ERROR_MEMORY_SHAPE, "luna_causal_attention_layer_forward", p, c->dim, x->shape[0],
                      c->dim);
  scope = luna_scope_begin(x->ctx);
  if (!LUNAI_BUMPS(x->ctx))
    lengths = lunai_memory_lengths(x->ctx, lengths, x->shape[0], p->shape[p->rank - 2], &failed);
  if (failed) return NULL;
  s = LUNAI_BUMPS(x->ctx) ? lunai_scores_past(layer, x, past) : lunai_causal_scores(layer, x, p);
  q = luna_linear_layer_forward(&layer->q, x);
  v = luna_linear_layer_forward(&layer->v, x);
  k = c->sharing == LUNA_SHARING_TIED ? v : luna_linear_layer_forward(&layer->k, x);
  v = lunai_causal_nested(q, k, v, s, c->heads, c->omega, lengths, c->dropout, past);
  return lunai_result(scope, lunai_linear_with(v, layer->out.weight, layer->out.bias, LUNA_ACTIVATION_NONE, residual,
                                               dropout));
}
LUNA_API luna_tensor *luna_causal_attention_layer_forward(const luna_causal_attention_layer *layer, luna_tensor *x,
                                                          luna_tensor *p, const int32_t *lengths) {
  return lunai_causal_attention(layer, x, p, NULL, 0, lengths, NULL);
}

/* --- the attentions Luna is compared with: softmax, linear, Linformer --- */
/* from the first of `count` to the last, evenly; 0: all the same */
LUNAI_FN int64_t lunai_taper(int64_t first, int64_t last, int64_t i, int64_t count) {
  return last == 0 || count < 2 ? first : first + (last - first) * i / (count - 1);
}
LUNAI_FN int64_t lunai_window(const luna_linformer_config *c, int64_t k) { return lunai_divide_up(c->max_length, k); }

/* E (or F), large enough for every head's k, and for every layer's up to last_layer when it is not 0: [k, m], or one
   kernel [1, w] that starts as the mean; false when it could not be made. No projection to learn: null, true */
LUNAI_FN bool lunai_linformer_init(luna_params *params, const char *prefix, const char *name,
                                   const luna_linformer_config *c, int64_t last_layer, luna_tensor **e) {
  const int64_t head = c->k_last_head ? c->k_last_head : c->k, layer = last_layer ? last_layer : c->k;
  const int64_t max = lunai_max(c->k, lunai_max(head, layer)),
      widest = lunai_window(c, lunai_min(c->k, lunai_min(head, layer)));
  *e = NULL;
  if (c->projection == LUNA_LINFORMER_PROJECTION_LINEAR)
    *e = lunai_named(params, prefix, name, 2, max, c->max_length, lunai_init(LUNA_INIT_XAVIER, 1));
  else if (c->projection == LUNA_LINFORMER_PROJECTION_CONVOLUTION)
    *e = lunai_named(params, prefix, name, 2, 1, widest, lunai_init(LUNA_INIT_ONES, 1.0f / (float)widest));
  else return true;
  return *e != NULL;
}
LUNAI_FN bool lunai_linformer_config(luna_ctx *ctx, luna_linformer_config *c) {
  if (c->max_length == 0) c->max_length = 512;
  if (c->k == 0) c->k = lunai_min(64, c->max_length);
  return lunai_in(ctx, ctx->call, "linformer.max_length", c->max_length, 1, 1 << 26) &&
         lunai_in(ctx, ctx->call, "linformer.k", c->k, 1, c->max_length) &&
         lunai_in(ctx, ctx->call, "linformer.k_last_layer", c->k_last_layer, 0, c->max_length) &&
         lunai_in(ctx, ctx->call, "linformer.k_last_head", c->k_last_head, 0, c->max_length) &&
         lunai_in(ctx, ctx->call, "linformer.sharing", (int64_t)c->sharing, 0, LUNA_LINFORMER_SHARING_LAYERWISE) &&
         lunai_in(ctx, ctx->call, "linformer.projection", (int64_t)c->projection, 0,
                  LUNA_LINFORMER_PROJECTION_CONVOLUTION);
}

LUNA_API luna_status luna_attention_layer_init(luna_attention_layer *layer, luna_params *params, const char *prefix,
                                               const luna_attention_layer_config *config) {
  luna_attention_layer_config c;
  luna_init init;
  lunai_setup s;
  bool good;
  if (!lunai_setup_begin(&s, "luna_attention_layer_init", params, prefix, layer, sizeof *layer))
    return lunai_setup_end(&s, false);
  memset(&c, 0, sizeof c);
  c.kind = LUNA_ATTENTION_SOFTMAX;
  if (config) c = *config;
  lunai_default_sizes(&c.dim, &c.heads);
  if (!lunai_attention_good(params->ctx, c.dim, c.heads, c.dropout) ||
      !lunai_in(params->ctx, params->ctx->call, "kind", (int64_t)c.kind, LUNA_ATTENTION_SOFTMAX,
                LUNA_ATTENTION_LINFORMER))
    return lunai_setup_end(&s, false);
  if (c.causal && c.kind == LUNA_ATTENTION_LINFORMER) {
    lunai_fail_status(params->ctx, LUNA_ERROR_LINFORMER_CAUSAL, params->ctx->call);
    return lunai_setup_end(&s, false);
  }
  if (c.kind == LUNA_ATTENTION_LINFORMER && !lunai_linformer_config(params->ctx, &c.linformer))
    return lunai_setup_end(&s, false);
  memset(layer, 0, sizeof *layer);
  init = lunai_projection_init(c.bert_init, false);
  good = lunai_linear_init(&layer->q, params, prefix, "q_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->k, params, prefix, "k_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->v, params, prefix, "v_proj", c.dim, c.dim, init);
  good = good && lunai_linear_init(&layer->out, params, prefix, "out_proj", c.dim, c.dim,
                                   lunai_projection_init(c.bert_init, true));
  if (c.kind == LUNA_ATTENTION_LINFORMER && c.linformer.sharing != LUNA_LINFORMER_SHARING_LAYERWISE) {
    good = good && lunai_linformer_init(params, prefix, "e_proj", &c.linformer, 0, &layer->e);
    layer->f = layer->e;
    if (c.linformer.sharing == LUNA_LINFORMER_SHARING_HEADWISE)
      good = good && lunai_linformer_init(params, prefix, "f_proj", &c.linformer, 0, &layer->f);
  }
  layer->config = c;
  return lunai_setup_end(&s, good);
}

/* elu+1 features; a column of ones beside each head's values gives the normaliser: out = phi(q) sum phi(k)^T [v 1],
   divided by its last column */
LUNAI_FN luna_tensor *lunai_linear_attention(luna_tensor *q, luna_tensor *k, luna_tensor *v, int64_t heads, bool causal,
                                             const int32_t *lengths) {
  luna_tensor *parts[2], *y;
  int64_t shape[4];
  if (!q || !k || !v) return NULL;
  shape[0] = v->shape[0]; shape[1] = v->shape[1]; shape[2] = heads; shape[3] = 1;
  parts[0] = lunai_reshape(v, 4, v->shape[0], v->shape[1], heads, v->shape[2] / heads);
  parts[1] = luna_elu1(luna_tensor_new(v->ctx, NULL, 4, shape)); /* elu(0) + 1 */
  v = luna_mask(lunai_reshape(luna_concat(parts, 2, 3), 3, v->shape[0], v->shape[1], v->shape[2] + heads, 1), lengths);
  q = luna_elu1(q);
  k = luna_mask(luna_elu1(k), lengths);
  if (causal) {
    y = luna_causal_product(q, k, v, heads);
    if (!y) return NULL;
    y = luna_ratio(lunai_reshape(y, 4, y->shape[0], y->shape[1], heads, y->shape[2] / heads));
    return y ? lunai_reshape(y, 3, y->shape[0], y->shape[1], heads * y->shape[3], 1) : NULL;
  }
  y = luna_matmul(lunai_split_heads(k, heads), lunai_split_heads(v, heads), true, false);
  return lunai_merge_heads(luna_ratio(luna_matmul(lunai_split_heads(q, heads), y, false, false)));
}

/* lengths of each sequence in windows, or in rows (w = 1); without lengths all are `n` */
LUNAI_FN const int32_t *lunai_window_lengths(luna_ctx *ctx, const int32_t *lengths, int64_t batch, int64_t n,
                                             int64_t w) {
  void *memory;
  int64_t i;
  if (!lunai_step(ctx, (size_t)batch * sizeof(int32_t), false, &memory))
    return lunai_fail_op_memory(ctx, "lengths", (size_t)batch * sizeof(int32_t)), (const int32_t *)NULL;
  for (i = 0; i < batch; i++) ((int32_t *)memory)[i] = (int32_t)lunai_divide_up(lengths ? lengths[i] : n, w);
  return (const int32_t *)memory;
}

/* Keys or values [batch, n, c] shortened to [batch, k, c], or [batch, windows, c] */
LUNAI_FN luna_tensor *lunai_shorten(const luna_linformer_config *c, luna_tensor *x, luna_tensor *e, int64_t k,
                                    const int32_t *lengths) {
  const int64_t batch = x->shape[0], n = x->shape[1], width = x->shape[2], w = lunai_window(c, k),
      windows = lunai_divide_up(n, w);
  const float fill = c->projection == LUNA_LINFORMER_PROJECTION_MAX ? -3.402823466e+38f : 0;
  luna_tensor *parts[2];
  int64_t shape[3];
  if (c->projection == LUNA_LINFORMER_PROJECTION_LINEAR) {
    x = luna_matmul(luna_mask(x, lengths), luna_slice(luna_slice(e, 0, 0, k), 1, 0, n), true, true);
    return lunai_permute(x, 0, 2, 1, 3);
  }
  if (windows * w > n) {
    shape[0] = batch; shape[1] = windows * w - n; shape[2] = width;
    parts[0] = x;
    parts[1] = luna_tensor_new(x->ctx, NULL, 3, shape);
    x = luna_concat(parts, 2, 1);
  }
  if (x && (lengths || windows * w > n) && (lengths = lunai_window_lengths(x->ctx, lengths, batch, n, 1)) == NULL)
    return NULL;
  x = lunai_reshape(x ? lunai_mask(x, lengths, fill) : NULL, 4, batch, windows, w, width);
  if (c->projection == LUNA_LINFORMER_PROJECTION_MAX) return luna_max(x, 2);
  if (c->projection == LUNA_LINFORMER_PROJECTION_MEAN) return luna_mean(x, 2);
  return lunai_reshape(luna_matmul(x, luna_slice(e, 1, 0, w), true, true), 3, batch, windows, width, 1);
}

/* Linformer: heads [first, first + heads), which share one k */
LUNAI_FN luna_tensor *lunai_linformer_heads(const luna_attention_layer *layer, luna_tensor *q, luna_tensor *k,
                                            luna_tensor *v, int64_t first, int64_t heads, const int32_t *lengths) {
  const luna_linformer_config *c = &layer->config.linformer;
  const int64_t width = layer->config.dim / layer->config.heads * heads,
      from = first * (layer->config.dim / layer->config.heads);
  const int64_t size = lunai_taper(c->k, c->k_last_head, first, layer->config.heads), n = k->shape[1];
  luna_attention_config a;
  memset(&a, 0, sizeof a);
  a.heads = heads;
  a.dropout = layer->config.dropout;
  if (heads < layer->config.heads) {
    q = luna_slice(q, 2, from, width);
    k = luna_slice(k, 2, from, width);
    v = luna_slice(v, 2, from, width);
  }
  if (!q || !k || !v) return NULL;
  if (c->projection != LUNA_LINFORMER_PROJECTION_LINEAR && lengths &&
      (a.lengths = lunai_window_lengths(q->ctx, lengths, q->shape[0], n, lunai_window(c, size))) == NULL) return NULL;
  return luna_softmax_attention(q, lunai_shorten(c, k, layer->e, size, lengths),
                                lunai_shorten(c, v, layer->f, size, lengths), &a);
}
LUNAI_FN luna_tensor *lunai_linformer(const luna_attention_layer *layer, luna_tensor *q, luna_tensor *k, luna_tensor *v,
                                      const int32_t *lengths) {
  const luna_linformer_config *c = &layer->config.linformer;
  luna_tensor *parts[2] = { NULL, NULL };
  int64_t h;
  if (!q || !k || !v) return NULL;
  if (k->shape[1] > c->max_length)
    return lunai_fail(k->ctx, LUNA_ERROR_MAX_LENGTH, "Linformer", k->shape[1], c->max_length);
  if ((!layer->e || !layer->f) && (c->projection == LUNA_LINFORMER_PROJECTION_LINEAR ||
                                   c->projection == LUNA_LINFORMER_PROJECTION_CONVOLUTION))
    return lunai_fail(k->ctx, LUNA_ERROR_LINFORMER_PROJECTION);
  if (c->k_last_head == 0) return lunai_linformer_heads(layer, q, k, v, 0, layer->config.heads, lengths);
  for (h = 0; h < layer->config.heads; h++) {
    parts[1] = lunai_linformer_heads(layer, q, k, v, h, 1, lengths);
    parts[0] = h == 0 ? parts[1] : luna_concat(parts, 2, 2);
  }
  return parts[0];
}

LUNA_API luna_tensor *luna_attention_layer_forward(const luna_attention_layer *layer, luna_tensor *x,
                                                   luna_tensor *context, const int32_t *lengths) {
  const luna_attention_layer_config *c;
  luna_attention_config a;
  luna_tensor *q, *k, *v, *y;
  luna_scope scope;
  if (!lunai_layer_made(x, layer ? layer->q.weight : NULL, "luna_attention_layer_forward")) return NULL;
  c = &layer->config;
  if (!context) context = x;
  if (!lunai_is_sequence("luna_attention_layer_forward", "x", x, x->shape[0], c->dim) ||
      !lunai_is_sequence("luna_attention_layer_forward", "context", context, x->shape[0], c->dim)) return NULL;
  scope = luna_scope_begin(x->ctx);
  q = luna_linear_layer_forward(&layer->q, x);
  k = luna_linear_layer_forward(&layer->k, context);
  v = luna_linear_layer_forward(&layer->v, context);
  memset(&a, 0, sizeof a);
  a.heads = c->heads;
  a.lengths = lengths;
  a.causal = c->causal;
  a.dropout = c->dropout;
  y = c->kind == LUNA_ATTENTION_SOFTMAX ? luna_softmax_attention(q, k, v, &a) :
      c->kind == LUNA_ATTENTION_LINEAR ? lunai_linear_attention(q, k, v, c->heads, c->causal, lengths) :
          lunai_linformer(layer, q, k, v, lengths);
  return lunai_result(scope, luna_linear_layer_forward(&layer->out, y));
}

/* --- encoder, decoder and causal layers, eq. 6 --- */
#ifdef LUNA_ONLY_STREAM
#define lunai_is_luna(config) ((void)(config), true)
#else
LUNAI_FN bool lunai_is_luna(const luna_layer_config *c) { return c->attention == LUNA_ATTENTION_LUNA && !c->hook; }
#endif
/* Rejects a config's number that contradicts the one it derives from; 0 = unset */
LUNAI_FN bool lunai_agrees(luna_ctx *ctx, const char *name, int64_t value, const char *from, int64_t expected) {
  if (value == 0 || value == expected) return true;
  return lunai_fail_status(ctx, LUNA_ERROR_FIELD_DIFFERS, ctx->call, name, value, from, expected) == LUNA_OK;
}
/* Rejects a number other than 0 of what there is not; why: "with ...", "in ..." */
LUNAI_FN bool lunai_is_unused(luna_ctx *ctx, const char *name, int64_t value, const char *why) {
  return value == 0 || lunai_fail_status(ctx, LUNA_ERROR_FIELD_UNUSED, ctx->call, name, value, why) == LUNA_OK;
}
/* Rejects what this kind of layer does not have. Fields of the attentions not chosen are ignored, so that changing
   `attention` alone compares them. */
typedef enum lunai_layer_kind { LUNAI_ENCODER_LAYER, LUNAI_DECODER_LAYER, LUNAI_CAUSAL_LAYER } lunai_layer_kind;
LUNAI_FN bool lunai_layer_agrees(luna_ctx *ctx, const luna_layer_config *c, lunai_layer_kind kind) {
  const bool causal = kind == LUNAI_CAUSAL_LAYER, encoder = kind == LUNAI_ENCODER_LAYER;
  const bool tied = causal && lunai_is_luna(c) && c->sharing != LUNA_SHARING_FULL;
  return (!c->hook || lunai_is_unused(ctx, "layer.attention", c->attention, "with a hook")) &&
         (causal || lunai_is_unused(ctx, "layer.convolution", c->convolution, "in an encoder or decoder layer")) &&
         (encoder || lunai_is_unused(ctx, "layer.own_memory", c->own_memory, "in a causal or decoder layer")) &&
         (!tied || lunai_is_unused(ctx, "layer.sharing", c->sharing, "or LUNA_SHARING_FULL in a causal layer"));
}
/* The layers' sizes, which a model's config has in two places: where one is 0 the other counts */
LUNAI_FN void lunai_layer_sizes(int64_t *dim, int64_t *heads, int64_t *ffn, luna_layer_config *layer) {
  if (*dim == 0) *dim = layer->dim;
  if (*heads == 0) *heads = layer->heads;
  if (*ffn == 0) *ffn = layer->ffn;
  lunai_default_sizes(dim, heads);
  layer->dim = *dim;
  layer->heads = *heads;
  layer->ffn = *ffn;
}
/* fills in the defaults; false with a sentence when the config is invalid */
LUNAI_FN bool lunai_layer_config(luna_ctx *ctx, const luna_layer_config *config, lunai_layer_kind kind,
                                 luna_layer_config *c) {
  if (config) *c = *config;
  else memset(c, 0, sizeof *c);
  if (!lunai_layer_agrees(ctx, c, kind)) return false;
  lunai_default_sizes(&c->dim, &c->heads);
  if (c->pack_heads == 0) c->pack_heads = c->heads;
  if (c->ffn == 0) c->ffn = lunai_checked(4, c->dim);
  if (c->activation == LUNA_ACTIVATION_NONE) c->activation = LUNA_ACTIVATION_RELU;
  if (c->omega == LUNA_ACTIVATION_NONE) c->omega = LUNA_ACTIVATION_SOFTPLUS2;
  return lunai_in(ctx, ctx->call, "dim", c->dim, 1, 1 << 24) && lunai_in(ctx, ctx->call, "ffn", c->ffn, 1, 1 << 26) &&
         lunai_in(ctx, ctx->call, "layer.convolution", c->convolution, 0, 1024) &&
         lunai_is_probability(ctx, ctx->call, "layer.dropout", c->dropout) &&
         lunai_is_probability(ctx, ctx->call, "layer.attention_dropout", c->attention_dropout) &&
         lunai_is_probability(ctx, ctx->call, "layer.activation_dropout", c->activation_dropout) &&
         lunai_in(ctx, ctx->call, "layer.activation", (int64_t)c->activation, 0, LUNA_ACTIVATION_TANH) &&
         lunai_in(ctx, ctx->call, "layer.attention", (int64_t)c->attention, 0, LUNA_ATTENTION_LINFORMER) &&
         lunai_in(ctx, ctx->call, "layer.recompute", (int64_t)c->recompute, 0, LUNA_RECOMPUTE_LAYER) &&
         lunai_in(ctx, ctx->call, "layer.own_memory", c->own_memory, 0, 1 << 20) &&
         lunai_is_given(ctx, ctx->call, "layer.hook->init or layer.hook->forward",
                        !c->hook || (c->hook->init && c->hook->forward));
}
LUNAI_FN luna_nested_attention_layer_config lunai_nested_config(const luna_layer_config *c) {
  luna_nested_attention_layer_config a;
  a.dim = c->dim;
  a.heads = c->heads;
  a.pack_heads = c->pack_heads;
  a.sharing = c->sharing;
  a.dropout = c->attention_dropout;
  a.bert_init = c->bert_init;
  return a;
}
LUNAI_FN luna_causal_attention_layer_config lunai_causal_config(const luna_layer_config *c) {
  luna_causal_attention_layer_config a;
  a.dim = c->dim;
  a.heads = c->heads;
  a.sharing = c->sharing == LUNA_SHARING_FULL ? LUNA_SHARING_FULL : LUNA_SHARING_TIED;
  a.omega = c->omega;
  a.dropout = c->attention_dropout;
  a.bert_init = c->bert_init;
  return a;
}
LUNAI_FN bool lunai_ffn_init(luna_linear_layer *fc1, luna_linear_layer *fc2, luna_linear_layer *fc3,
    luna_params *params, const char *prefix, const luna_layer_config *c) {
  const luna_init init = lunai_projection_init(c->bert_init, true);
  memset(fc3, 0, sizeof *fc3);
  return lunai_linear_init(fc1, params, prefix, "fc1", c->dim, c->ffn, init) && lunai_linear_init(fc2, params, prefix,
      "fc2", c->ffn, c->dim, init) &&
         (!c->gated || lunai_linear_init(fc3, params, prefix, "fc3", c->dim, c->ffn, init));
}

/* the end of a half-layer: its sum, normed when post-norm */
LUNAI_FN luna_tensor *lunai_sum_normed(const luna_layer_config *c, luna_tensor *sum, const luna_norm_layer *norm) {
  return c->pre_norm || !sum ? sum : luna_norm_layer_forward(norm, sum);
}
/* x + y after y's dropout, normed when post-norm */
LUNAI_FN luna_tensor *lunai_residual(const luna_layer_config *c, luna_tensor *x, luna_tensor *y,
                                     const luna_norm_layer *norm) {
  return lunai_sum_normed(c, luna_add(x, luna_dropout(y, c->dropout)), norm);
}
/* the input of a half-layer: normed when pre-norm */
LUNAI_FN luna_tensor *lunai_normed(const luna_layer_config *c, luna_tensor *x, const luna_norm_layer *norm) {
  return c->pre_norm && x ? luna_norm_layer_forward(norm, x) : x;
}

/* x + FFN(x) */
LUNAI_FN luna_tensor *lunai_ffn(const luna_layer_config *c, luna_tensor *x, const luna_linear_layer *fc1,
    const luna_linear_layer *fc2, const luna_linear_layer *fc3,
                                const luna_norm_layer *norm) {
  luna_feed_forward_config f;
  f.activation = c->activation;
  f.activation_dropout = c->activation_dropout;
  f.dropout = c->dropout;
  f.residual = x;
  f.gate = fc3->weight;
  f.gate_bias = fc3->bias;
  /* of a layer that is computed again as well: it need not hold a hidden layer then either */
  f.recompute = c->recompute != LUNA_RECOMPUTE_NONE;
  return luna_feed_forward(lunai_normed(c, x, norm), fc1->weight, fc1->bias, fc2->weight, fc2->bias, &f);
}

/* --- the attention of an encoder or causal layer that is not Luna's --- */
LUNAI_FN bool lunai_other_init(luna_attention_layer *other_attention, void **hook_state, luna_params *params,
                               const char *prefix, const luna_layer_config *c, bool causal) {
  luna_attention_layer_config a;
  if (c->hook) {
    *hook_state = c->hook->init(c->hook->user, params, prefix, c);
    if (!*hook_state && params->ctx->last_status == LUNA_OK)
      lunai_fail_status(params->ctx, LUNA_ERROR_HOOK_INIT, params->ctx->call, prefix);
    return *hook_state != NULL;
  }
  memset(&a, 0, sizeof a);
  a.kind = c->attention;
  a.dim = c->dim;
  a.heads = c->heads;
  a.causal = causal;
  a.dropout = c->attention_dropout;
  a.bert_init = c->bert_init;
  a.linformer = c->linformer;
  return luna_attention_layer_init(other_attention, params, prefix, &a) == LUNA_OK;
}
/* input: the layer's, x: the attention's; *p: what comes in; what a hook hands out, else null */
LUNAI_FN luna_tensor *lunai_other(const luna_layer_config *c, const luna_attention_layer *other_attention,
                                  void *hook_state, luna_tensor *input, luna_tensor *x, const luna_norm_layer *norm,
                                  luna_tensor **p, const int32_t *lengths, bool causal) {
  const char *name = causal ? "luna_causal_layer_forward" : "luna_encoder_layer_forward";
  luna_attention_call call;
  luna_tensor *y;
  int i;
  memset(&call, 0, sizeof call);
  call.x = x;
  call.input = input;
  call.norm = c->pre_norm ? norm : NULL;
  call.p = *p;
  call.lengths = lengths;
  call.causal = causal;
  *p = NULL;
  if (!x || !c->hook) return luna_attention_layer_forward(other_attention, x, NULL, lengths);
  y = c->hook->forward(hook_state, &call);
  *p = call.next_p;
  for (i = 0; i < LUNAI_LENGTH(call.kept); i++) (void)luna_keep(call.kept[i]);
  if (!y) return x->ctx->status == LUNA_OK ? lunai_fail(x->ctx, LUNA_ERROR_HOOK_NULL, name) : NULL;
  if (y->rank == x->rank && memcmp(y->shape, x->shape, sizeof x->shape) == 0) return y;
  return lunai_fail(x->ctx, LUNA_ERROR_HOOK_SHAPE, name, y, x);
}

LUNAI_FN luna_scope lunai_layer_scope(const luna_layer_config *c, luna_ctx *ctx) {
  return c->recompute == LUNA_RECOMPUTE_LAYER ? luna_scope_recompute(ctx) : luna_scope_begin(ctx);
}

/* a learned P */
LUNAI_FN luna_tensor *lunai_memory_init(luna_params *params, const char *prefix, int64_t slots, int64_t dim) {
  return lunai_named(params, prefix, "projected_embeddings", 2, slots, dim,
                     lunai_init(LUNA_INIT_NORMAL, (float)(1.0 / sqrt((double)dim))));
}

LUNA_API luna_status luna_encoder_layer_init(luna_encoder_layer *layer, luna_params *params, const char *prefix,
                                             const luna_layer_config *config) {
  char name[LUNAI_MAX_NAME];
  luna_nested_attention_layer_config attention;
  lunai_setup s;
  bool good, is_luna;
  if (!lunai_setup_begin(&s, "luna_encoder_layer_init", params, prefix, layer, sizeof *layer))
    return lunai_setup_end(&s, false);
  memset(layer, 0, sizeof *layer);
  good = lunai_layer_config(params->ctx, config, LUNAI_ENCODER_LAYER, &layer->config) &&
         lunai_name(params, name, prefix, "self_attn.");
  is_luna = lunai_is_luna(&layer->config);
  if (good && is_luna && layer->config.own_memory)
    good = (layer->memory = lunai_memory_init(params, prefix, layer->config.own_memory, layer->config.dim)) != NULL;
  attention = lunai_nested_config(&layer->config);
  if (is_luna) good = good && luna_nested_attention_layer_init(&layer->attention, params, name, &attention) == LUNA_OK;
  else good = good && lunai_other_init(&layer->other_attention, &layer->hook_state, params, name, &layer->config,
                                       false);
  good = good && lunai_norm_init(&layer->attention_norm, params, prefix, "self_attn_layer_norm", layer->config.dim);
  if (is_luna)
    good = good && lunai_norm_init(&layer->memory_norm, params, prefix, "self_atten_proj_layer_norm",
                                   layer->config.dim);
  good = good && lunai_ffn_init(&layer->fc1, &layer->fc2, &layer->fc3, params, prefix, &layer->config);
  good = good && lunai_norm_init(&layer->final_norm, params, prefix, "final_layer_norm", layer->config.dim);
  return lunai_setup_end(&s, good);
}

/* Luna attention with both residuals; next_x or next_p is null where its result is not wanted */
LUNAI_FN bool lunai_nested_half(const luna_layer_config *c, const luna_nested_attention_layer *attention,
                                luna_tensor *x,
                                luna_tensor *p, luna_tensor *context, const int32_t *lengths,
                                    const luna_norm_layer *norm,
                                const luna_norm_layer *memory_norm, luna_tensor **next_x, luna_tensor **next_p) {
  const luna_scope scope = luna_scope_begin(x ? x->ctx : NULL);
  luna_tensor *y_p = NULL, *sum = NULL, *in = lunai_normed(c, x, norm);
  if (!lunai_nested_attention(attention, in, lunai_normed(c, p, memory_norm), context ? context : in, x, c->dropout,
                              lengths, next_x ? &sum : NULL, &y_p)) return false;
  if (next_x) *next_x = lunai_sum_normed(c, sum, norm);
  if (next_p) *next_p = lunai_residual(c, p, y_p, memory_norm);
  (void)lunai_results(scope, next_x ? *next_x : NULL, next_p ? *next_p : NULL);
  return (!next_x || *next_x) && (!next_p || *next_p);
}

/* *next_x: X'; *next_p: P', of Luna attention. next_x or next_p is null where its result is not wanted. */
LUNAI_FN bool lunai_encoder_layer(const luna_encoder_layer *layer, luna_scope outer, luna_tensor *x, luna_tensor *p,
                                  const int32_t *lengths, luna_tensor **next_x, luna_tensor **next_p) {
  const luna_layer_config *c;
  luna_tensor *y;
  luna_scope scope;
  bool is_luna;
  if (!lunai_layer_made(x, layer ? layer->fc1.weight : NULL, "luna_encoder_layer_forward")) return false;
  c = &layer->config;
  is_luna = lunai_is_luna(c);
  if (is_luna && !p && !layer->memory) return lunai_fail_null(x->ctx, "luna_encoder_layer_forward", "p") != NULL;
  scope = c->recompute == LUNA_RECOMPUTE_LAYER ? luna_scope_recompute(x->ctx) : outer;
  if (!is_luna) {
    y = lunai_normed(c, x, &layer->attention_norm);
    y = lunai_other(c, &layer->other_attention, layer->hook_state, x, y, &layer->attention_norm, &p, lengths, false);
    x = lunai_residual(c, x, y, &layer->attention_norm);
  } else {
    if (layer->memory) {
      p = luna_slice(layer->memory, 0, 0, lunai_min(c->own_memory, lunai_max(1, x->shape[1])));
      p = luna_expand(p, x->shape[0]);
    }
    if (!lunai_nested_half(c, &layer->attention, x, p, NULL, lengths, &layer->attention_norm, &layer->memory_norm,
                           next_x ? &x : NULL, next_p ? &p : NULL)) return false;
  }
  if (!next_p) p = NULL;
  if (next_x) {
    x = lunai_results(scope, x, p);
    x = lunai_results(scope, lunai_ffn(c, x, &layer->fc1, &layer->fc2, &layer->fc3, &layer->final_norm), p);
    x = lunai_results(scope, lunai_sum_normed(c, x, &layer->final_norm), p);
    if (x) *next_x = x;
  } else (void)lunai_result(scope, p);
  if (x && p) *next_p = p;
  return x != NULL;
}
LUNA_API luna_tensor *luna_encoder_layer_forward(const luna_encoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 const int32_t *lengths) {
  luna_tensor *y = NULL;
  return lunai_encoder_layer(layer, luna_scope_begin(x ? x->ctx : NULL), x, p ? *p : NULL, lengths, &y, p) ? y : NULL;
}

LUNA_API luna_status luna_decoder_layer_init(luna_decoder_layer *layer, luna_params *params, const char *prefix,
                                             const luna_layer_config *config) {
  char name[LUNAI_MAX_NAME];
  luna_nested_attention_layer_config cross;
  luna_causal_attention_layer_config self;
  lunai_setup s;
  bool good;
  if (!lunai_setup_begin(&s, "luna_decoder_layer_init", params, prefix, layer, sizeof *layer))
    return lunai_setup_end(&s, false);
  if (config && !lunai_is_luna(config)) {
    lunai_fail_status(params->ctx, LUNA_ERROR_LUNA_ONLY, params->ctx->call, "a decoder layer");
    return lunai_setup_end(&s, false);
  }
  good = lunai_layer_config(params->ctx, config, LUNAI_DECODER_LAYER, &layer->config) &&
         lunai_name(params, name, prefix, "self_attn.");
  cross = lunai_nested_config(&layer->config);
  self = lunai_causal_config(&layer->config);
  good = good && luna_causal_attention_layer_init(&layer->self_attention, params, name, &self) == LUNA_OK;
  good = good && lunai_norm_init(&layer->self_norm, params, prefix, "self_attn_layer_norm", layer->config.dim);
  good = good && lunai_name(params, name, prefix, "encoder_attn.");
  good = good && luna_nested_attention_layer_init(&layer->cross_attention, params, name, &cross) == LUNA_OK;
  good = good && lunai_norm_init(&layer->cross_norm, params, prefix, "encoder_attn_layer_norm", layer->config.dim);
  good = good && lunai_norm_init(&layer->memory_norm, params, prefix, "encoder_atten_proj_layer_norm",
                                 layer->config.dim);
  good = good && lunai_ffn_init(&layer->fc1, &layer->fc2, &layer->fc3, params, prefix, &layer->config);
  good = good && lunai_norm_init(&layer->final_norm, params, prefix, "final_layer_norm", layer->config.dim);
  return lunai_setup_end(&s, good);
}

/* -> X'; *next_p: P', or next_p is null where it is not wanted; past: of a stream's layer, in place of p, context and
   lengths, or null */
LUNAI_FN luna_tensor *lunai_decoder_layer(const luna_decoder_layer *layer, luna_tensor *x, luna_tensor *p,
                                          luna_tensor *context, const int32_t *lengths, luna_tensor **next_p,
                                          lunai_past *past) {
  const luna_layer_config *c;
  luna_tensor *y;
  luna_scope scope;
  if (!lunai_layer_made(x, layer ? layer->fc1.weight : NULL, "luna_decoder_layer_forward")) return NULL;
  if (!past && (!p || !context)) return lunai_fail_null(x->ctx, "luna_decoder_layer_forward", p ? "context" : "p");
  c = &layer->config;
  scope = lunai_layer_scope(c, x->ctx);
  y = lunai_normed(c, x, &layer->self_norm);
  x = lunai_causal_attention(&layer->self_attention, y, p, x, c->dropout, lengths, past);
  x = lunai_result(scope, lunai_sum_normed(c, x, &layer->self_norm));
  if (past) {
    y = lunai_unpack_past(&layer->cross_attention, lunai_normed(c, x, &layer->cross_norm), x, past);
    x = lunai_sum_normed(c, y, &layer->cross_norm);
  } else if (!lunai_nested_half(c, &layer->cross_attention, x, p, context, lengths, &layer->cross_norm,
                                &layer->memory_norm, &x,
                         next_p ? &p : NULL)) return NULL;
  if (!next_p) p = NULL;
  x = lunai_results(scope, x, p);
  x = lunai_results(scope, lunai_ffn(c, x, &layer->fc1, &layer->fc2, &layer->fc3, &layer->final_norm), p);
  x = lunai_results(scope, lunai_sum_normed(c, x, &layer->final_norm), p);
  if (x && p) *next_p = p;
  return x;
}
LUNA_API luna_tensor *luna_decoder_layer_forward(const luna_decoder_layer *layer, luna_tensor *x, luna_tensor **p,
                                                 luna_tensor *context, const int32_t *lengths) {
  return lunai_decoder_layer(layer, x, p ? *p : NULL, context, lengths, p, NULL);
}

LUNA_API luna_status luna_causal_layer_init(luna_causal_layer *layer, luna_params *params, const char *prefix,
                                            int64_t memory, const luna_layer_config *config) {
  char name[LUNAI_MAX_NAME];
  luna_causal_attention_layer_config attention;
  lunai_setup s;
  bool good, is_luna;
  if (!lunai_setup_begin(&s, "luna_causal_layer_init", params, prefix, layer, sizeof *layer))
    return lunai_setup_end(&s, false);
  is_luna = !config || lunai_is_luna(config);
  if (memory == 0) memory = 16;
  if (is_luna && !lunai_in(params->ctx, params->ctx->call, "memory", memory, 1, LUNAI_MAX_COUNT))
    return lunai_setup_end(&s, false);
  memset(layer, 0, sizeof *layer);
  good = lunai_layer_config(params->ctx, config, LUNAI_CAUSAL_LAYER, &layer->config) &&
         lunai_name(params, name, prefix, "self_attn.");
  attention = lunai_causal_config(&layer->config);
  if (good && is_luna) good = (layer->memory = lunai_memory_init(params, prefix, memory, layer->config.dim)) != NULL;
  if (good && layer->config.convolution) {
    layer->kernel = lunai_named(params, prefix, "conv.weight", 2, layer->config.dim, layer->config.convolution,
                                lunai_init(LUNA_INIT_IDENTITY, 0.1f));
    layer->kernel_bias = layer->kernel ? lunai_named(params, prefix, "conv.bias", 1, layer->config.dim, 1,
                                                     lunai_init(LUNA_INIT_ZEROS, 0)) : NULL;
    good = layer->kernel_bias != NULL;
  }
  if (is_luna) good = good && luna_causal_attention_layer_init(&layer->attention, params, name, &attention) == LUNA_OK;
  else good = good && lunai_other_init(&layer->other_attention, &layer->hook_state, params, name, &layer->config, true);
  good = good && lunai_norm_init(&layer->attention_norm, params, prefix, "self_attn_layer_norm", layer->config.dim);
  good = good && lunai_ffn_init(&layer->fc1, &layer->fc2, &layer->fc3, params, prefix, &layer->config);
  good = good && lunai_norm_init(&layer->final_norm, params, prefix, "final_layer_norm", layer->config.dim);
  return lunai_setup_end(&s, good);
}

LUNAI_FN luna_tensor *lunai_causal_layer(const luna_causal_layer *layer, luna_tensor *x, lunai_past *past) {
  const luna_layer_config *c;
  luna_tensor *y, *p = NULL;
  luna_scope scope;
  if (!lunai_layer_made(x, layer ? layer->fc1.weight : NULL, "luna_causal_layer_forward")) return NULL;
  c = &layer->config;
  scope = lunai_layer_scope(c, x->ctx);
  y = lunai_normed(c, x, &layer->attention_norm);
  if (layer->kernel) y = lunai_short_convolution(y, layer->kernel, layer->kernel_bias, past);
  if (lunai_is_luna(c)) {
    y = lunai_causal_attention(&layer->attention, y, layer->memory, x, c->dropout, NULL, past);
    y = lunai_sum_normed(c, y, &layer->attention_norm);
  } else {
    y = lunai_other(c, &layer->other_attention, layer->hook_state, x, y, &layer->attention_norm, &p, NULL, true);
    y = lunai_residual(c, x, y, &layer->attention_norm);
  }
  y = lunai_result(scope, y);
  y = lunai_result(scope, lunai_ffn(c, y, &layer->fc1, &layer->fc2, &layer->fc3, &layer->final_norm));
  return lunai_result(scope, lunai_sum_normed(c, y, &layer->final_norm));
}
LUNA_API luna_tensor *luna_causal_layer_forward(const luna_causal_layer *layer, luna_tensor *x) {
  return lunai_causal_layer(layer, x, NULL);
}
#ifdef LUNA_ONLY_STREAM
#pragma pop_macro("LUNA_API")
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   >>models: causal language model, encoder, classifier, masked language model, encoder-decoder. Guarded by
   tests/golden.c and tests/models.c.
   ------------------------------------------------------------------------------------------------------------------ */
/* The fields of a model's config in a checkpoint's __metadata__, F(name, min, max), for writing, reading and
   checking. A field whose min is 0 may be absent. */
#define LUNAI_LM_FIELDS(F) \
  F(vocab, 1, 1 << 24) F(layers, 1, 1024) F(memory, 1, 1 << 20) F(dim, 1, 1 << 20) F(heads, 1, 1 << 16) F(ffn, 1, \
      1 << 22) F(convolution, 0, 1024) \
  F(sharing, 0, 1) F(activation, 1, LUNA_ACTIVATION_TANH) F(gated, 0, 1) F(omega, 3, 5) F(pre_norm, 0, 1) \
  F(attention, 0, 3) F(positions, 0, 3) F(max_length, 0, 1 << 26) \
  F(features, 0, 1 << 20) F(outputs, 0, 1 << 24)
#define LUNAI_LM_KIND "causal_lm"
#define LUNAI_NO_KIND \
  "it has no luna.kind, as no model with an attention hook has: init that with its config and hook, then luna_load"
typedef struct lunai_lm_sizes {
#define LUNAI_FIELD(name, min, max) int64_t name;
  LUNAI_LM_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
} lunai_lm_sizes;
LUNAI_FN int64_t lunai_lm_outputs(const lunai_lm_sizes *s) { return s->outputs ? s->outputs : s->vocab; }

LUNAI_FN void lunai_lm_from_sizes(const lunai_lm_sizes *s, luna_lm_config *c) {
  memset(c, 0, sizeof *c);
  c->vocab = s->vocab; c->layers = s->layers; c->memory = s->memory;
  c->layer.dim = s->dim; c->layer.heads = s->heads; c->layer.ffn = s->ffn; c->layer.convolution = s->convolution;
  c->layer.sharing = (luna_sharing)s->sharing; c->layer.activation = (luna_activation)s->activation;
  c->layer.omega = (luna_activation)s->omega;
  c->layer.pre_norm = s->pre_norm != 0; c->layer.gated = s->gated != 0;
  c->layer.attention = (luna_attention_kind)s->attention; c->positions = (luna_positions)s->positions;
  c->max_length = s->max_length;
  c->features = s->features; c->outputs = s->outputs;
}

typedef struct lunai_field { const char *key; size_t at; int64_t min, max; } lunai_field;
static const lunai_field lunai_lm_fields[] = {
#define LUNAI_FIELD(name, min, max) { "luna." #name, offsetof(lunai_lm_sizes, name), min, max },
  LUNAI_LM_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
};
LUNAI_INLINE int64_t *lunai_field_of(const lunai_field *field, void *sizes) {
  return (int64_t *)(void *)((char *)sizes + field->at);
}

/* returns the first field that a file's metadata lacks or has out of range, or null */
LUNAI_FN const char *lunai_fields_read(const lunai_st *st, const lunai_field *fields, int count, void *sizes) {
  lunai_st_text value;
  size_t i;
  int f;
  for (f = 0; f < count; f++) {
    int64_t *out = lunai_field_of(&fields[f], sizes);
    *out = 0;
    if (!lunai_st_meta(st, fields[f].key, &value)) {
      if (fields[f].min > 0) return fields[f].key;
      continue;
    }
    if (value.size == 0 || value.size > 9) return fields[f].key;
    for (i = 0; i < value.size; i++) {
      if (value.at[i] < '0' || value.at[i] > '9') return fields[f].key;
      *out = *out * 10 + (value.at[i] - '0');
    }
    if (*out < fields[f].min || *out > fields[f].max) return fields[f].key;
  }
  return NULL;
}
/* not the model's: an optimiser's moments */
LUNAI_FN bool lunai_st_ours(lunai_st_text name) { return name.size >= 5 && memcmp(name.at, "luna.", 5) == 0; }

LUNAI_FN int64_t lunai_st_tensors(const lunai_st *st) { /* the model's */
  lunai_st_tensor t;
  size_t cursor = 0;
  int64_t count = 0;
  while (lunai_st_next(st, &cursor, &t)) count += !lunai_st_ours(t.name);
  return count;
}

LUNAI_FN bool lunai_st_matrix(const lunai_st *st, const char *name, int64_t rows, int64_t columns) {
  lunai_st_tensor t;
  return lunai_st_find(st, name, &t) && t.rank == 2 && t.shape[0] == rows && t.shape[1] == columns;
}

/* Sizes in a file's metadata are untrusted: before anything is allocated by them, the file's tensors must be as many
   and as large. */
LUNAI_FN const char *lunai_lm_claims(const lunai_st *st, const lunai_lm_sizes *s) {
  const int64_t linears = (s->attention ? 6 : s->sharing ? 8 : 7) + (s->gated != 0);
  const int64_t layer = (s->attention ? 0 : 1) + (s->convolution ? 2 : 0) + 2 * linears + 4;
  if (lunai_st_tensors(st) != (s->features ? 4 : 1) + (s->outputs ? 2 : 0) + (s->positions == LUNA_POSITIONS_LEARNED) +
                              s->layers * layer + (s->pre_norm ? 2 : 0))
    return "its tensors are not those of luna.layers layers";
  if (s->features ? !lunai_st_matrix(st, "input_proj.weight", s->dim, s->features) :
                    !lunai_st_matrix(st, "embed_tokens.weight", s->vocab, s->dim))
    return s->features ? "input_proj.weight is not [luna.dim, luna.features]" :
                         "embed_tokens.weight is not [luna.vocab, luna.dim]";
  if (s->outputs && !lunai_st_matrix(st, "output_projection.weight", s->outputs, s->dim))
    return "output_projection.weight is not [luna.outputs, luna.dim]";
  if (s->positions == LUNA_POSITIONS_LEARNED && !lunai_st_matrix(st, "embed_positions.weight", s->max_length, s->dim))
    return "embed_positions.weight is not [luna.max_length, luna.dim]";
  if (!s->attention && !lunai_st_matrix(st, "layers.0.projected_embeddings", s->memory, s->dim))
    return "layers.0.projected_embeddings is not [luna.memory, luna.dim]";
  if (!lunai_st_matrix(st, "layers.0.fc1.weight", s->ffn, s->dim))
    return "layers.0.fc1.weight is not [luna.ffn, luna.dim]";
  if (!lunai_st_matrix(st, "layers.0.self_attn.q_proj.weight", s->dim, s->dim))
    return "layers.0.self_attn.q_proj.weight is not [luna.dim, luna.dim]";
  return NULL;
}

/* reads the sizes of the model in a checkpoint; null, or what is wrong */
LUNAI_FN const char *lunai_lm_read(const lunai_st *st, lunai_lm_sizes *sizes) {
  lunai_st_text kind;
  if (!lunai_st_meta(st, "luna.kind", &kind)) return LUNAI_NO_KIND;
  if (!lunai_st_equal(kind, LUNAI_LM_KIND)) return "it holds no causal language model of luna.h";
  if (lunai_fields_read(st, lunai_lm_fields, LUNAI_LENGTH(lunai_lm_fields), sizes))
    return "a size of the model is missing from the metadata, or out of range";
  return sizes->dim % sizes->heads ? "luna.dim is not a multiple of luna.heads" : lunai_lm_claims(st, sizes);
}

/* one row of sinusoidal positions */
LUNAI_FN void lunai_sinusoid(int64_t position, int64_t d, float *out) {
  const int64_t half = d / 2;
  double s, c;
  int64_t i;
  for (i = 0; i < half; i++) {
    lunai_sine((double)position * lunai_frequency(i, half), &s, &c);
    out[i] = (float)s;
    out[half + i] = (float)c;
  }
  if (d % 2) out[d - 1] = 0;
}

#ifndef LUNA_ONLY_STREAM
/* positions first .. first + n as a tensor [n, d] */
LUNAI_FN luna_tensor *lunai_sinusoids(luna_ctx *ctx, int64_t first, int64_t n, int64_t d) {
  int64_t shape[2];
  lunai_build s;
  shape[0] = n;
  shape[1] = d;
  lunai_start_in(&s, ctx, LUNA_OP_SINUSOIDS, "sinusoidal positions");
  s.op.arg.sinusoids.first = first;
  return lunai_finish(&s, 2, shape);
}

/* x + positions: sinusoids, or rows of a learned table, from `first` on */
LUNAI_FN luna_tensor *lunai_add_positions(luna_tensor *x, luna_positions positions, luna_tensor *table, int64_t first) {
  if (!x || positions == LUNA_POSITIONS_NONE || positions == LUNA_POSITIONS_DEFAULT) return x;
  if (positions == LUNA_POSITIONS_SINUSOIDAL)
    return luna_add(x, lunai_sinusoids(x->ctx, first, x->shape[1], x->shape[2]));
  if (first + x->shape[1] > table->shape[0])
    return lunai_fail(x->ctx, LUNA_ERROR_MAX_LENGTH, "learned positions", x->shape[1], table->shape[0] - first);
  return luna_add(x, luna_slice(table, 0, first, x->shape[1]));
}

/* --- what all models' inits have in common --- */
LUNAI_FN luna_init lunai_embedding_init(int64_t dim, bool bert) {
  return lunai_init(LUNA_INIT_NORMAL, bert ? 0.02f : (float)(1.0 / sqrt((double)dim)));
}

LUNAI_FN bool lunai_fields_good(luna_ctx *ctx, const lunai_field *fields, int count, void *sizes) {
  int f;
  for (f = 0; f < count; f++)
    if (!lunai_in(ctx, ctx->call, fields[f].key + 5, *lunai_field_of(&fields[f], sizes), fields[f].min, fields[f].max))
      return false;
  return true;
}
LUNAI_FN bool lunai_fields_put(luna_params *params, const lunai_field *fields, int count, void *sizes) {
  char text[24];
  int f;
  bool good = true;
  for (f = 0; f < count && good; f++) {
    lunai_print(text, sizeof text, "%d", *lunai_field_of(&fields[f], sizes));
    good = lunai_params_put(params, fields[f].key, text) == LUNA_OK;
  }
  return good;
}
/* Dropout is stored for further training, in units of 10^-9, which give the same float again. */
#define LUNAI_DROPOUT_FIELDS(F) \
  F(dropout, 0, 999999999) F(attention_dropout, 0, 999999999) F(activation_dropout, 0, 999999999)
typedef struct lunai_dropouts {
#define LUNAI_FIELD(name, min, max) int64_t name;
  LUNAI_DROPOUT_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
} lunai_dropouts;
static const lunai_field lunai_dropout_fields[] = {
#define LUNAI_FIELD(name, min, max) { "luna." #name, offsetof(lunai_dropouts, name), min, max },
  LUNAI_DROPOUT_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
};
LUNAI_FN const char *lunai_dropouts_read(const lunai_st *st, luna_layer_config *c) {
  lunai_dropouts d;
  const char *wrong = lunai_fields_read(st, lunai_dropout_fields, LUNAI_LENGTH(lunai_dropout_fields), &d);
  if (wrong) return wrong;
#define LUNAI_FIELD(name, min, max) c->name = (float)((double)d.name * 1e-9);
  LUNAI_DROPOUT_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
  return NULL;
}
/* the model's pairs: its kind, its sizes, its dropouts */
LUNAI_FN bool lunai_fields_describe(luna_params *params, const char *kind, const luna_layer_config *c,
                                    const lunai_field *fields, int count, void *sizes) {
  lunai_dropouts d;
  if (c->hook) return true;          /* a hook cannot be stored */
#define LUNAI_FIELD(name, min, max) d.name = lunai_min((int64_t)((double)c->name * 1e9 + 0.5), max);
  LUNAI_DROPOUT_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
  return lunai_params_put(params, "luna.kind", kind) == LUNA_OK && lunai_fields_put(params, fields, count, sizes) &&
         lunai_fields_put(params, lunai_dropout_fields, LUNAI_LENGTH(lunai_dropout_fields), &d);
}
/* memory for a model's layers, zeroed */
LUNAI_FN bool lunai_layers_memory(luna_params *params, int64_t count, size_t size, void **out) {
  return lunai_persist(params->ctx, (size_t)count * size, false, out) ||
         lunai_fail_memory(params->ctx, params->ctx->call, (size_t)count * size) == LUNA_OK;
}

/* --- the causal language model --- */
LUNAI_FN void lunai_lm_to_sizes(const luna_lm_config *c, lunai_lm_sizes *s) {
  s->vocab = c->vocab; s->layers = c->layers; s->memory = c->memory;
  s->dim = c->layer.dim; s->heads = c->layer.heads; s->ffn = c->layer.ffn; s->convolution = c->layer.convolution;
  s->sharing = c->layer.sharing; s->activation = c->layer.activation; s->gated = c->layer.gated;
  s->omega = c->layer.omega; s->pre_norm = c->layer.pre_norm;
  s->attention = c->layer.attention; s->positions = c->positions; s->max_length = c->max_length;
  s->features = c->features; s->outputs = c->outputs;
}

LUNAI_FN bool lunai_lm_defaults(luna_ctx *ctx, const luna_lm_config *config, luna_lm_config *c) {
  lunai_lm_sizes s;
  luna_layer_config layer;
  if (config) *c = *config;
  else memset(c, 0, sizeof *c);
  if (c->vocab == 0) c->vocab = 256;
  if (c->outputs == 0) c->outputs = c->features;
  if (c->layers == 0) c->layers = 2;
  if (c->memory == 0) c->memory = 16;
  if (c->positions == LUNA_POSITIONS_DEFAULT) c->positions = LUNA_POSITIONS_NONE;
  if (c->max_length == 0) c->max_length = 512;
  layer = c->layer;
  lunai_layer_sizes(&c->dim, &c->heads, &c->ffn, &layer);
  if (!lunai_layer_config(ctx, &layer, LUNAI_CAUSAL_LAYER, &layer) || !lunai_is_omega(ctx, layer.omega) ||
      !lunai_agrees(ctx, "layer.dim", c->layer.dim, "dim", layer.dim) ||
      !lunai_agrees(ctx, "layer.heads", c->layer.heads, "heads", layer.heads) ||
      !lunai_agrees(ctx, "layer.ffn", c->layer.ffn, "ffn", layer.ffn)) return false;
  c->layer = layer;
  c->ffn = layer.ffn;
  lunai_lm_to_sizes(c, &s);
  return lunai_fields_good(ctx, lunai_lm_fields, LUNAI_LENGTH(lunai_lm_fields), &s);
}

LUNA_API luna_status luna_lm_init(luna_lm *model, luna_params *params, const luna_lm_config *config) {
  char prefix[48];
  lunai_setup s;
  lunai_lm_sizes sizes;
  luna_lm_config c;
  luna_init projection;
  void *memory = NULL;
  int64_t i;
  bool good;
  if (!lunai_setup_begin(&s, "luna_lm_init", params, NULL, model, sizeof *model))
    return lunai_setup_end(&s, false);
  if (!lunai_lm_defaults(params->ctx, config, &c)) return lunai_setup_end(&s, false);
  projection = lunai_projection_init(c.layer.bert_init, true);
  memset(model, 0, sizeof *model);
  if (c.features) good = lunai_input_init(&model->input, params, "", c.features, c.layer.dim, projection);
  else good = (model->embedding = lunai_named(params, "", "embed_tokens.weight", 2, c.vocab, c.layer.dim,
                                              lunai_embedding_init(c.layer.dim, c.layer.bert_init))) != NULL;
  if (good && c.positions == LUNA_POSITIONS_LEARNED)
    good = (model->positions = lunai_named(params, "", "embed_positions.weight", 2, c.max_length, c.layer.dim,
                                           lunai_embedding_init(c.layer.dim, c.layer.bert_init))) != NULL;
  good = good && lunai_layers_memory(params, c.layers, sizeof(luna_causal_layer), &memory);
  model->layers = (luna_causal_layer *)memory;
  for (i = 0; i < c.layers && good; i++) {
    lunai_print(prefix, sizeof prefix, "layers.%d.", i);
    good = luna_causal_layer_init(&model->layers[i], params, prefix, c.memory, &c.layer) == LUNA_OK;
  }
  if (good && c.layer.pre_norm) good = lunai_norm_init(&model->norm, params, "", "layer_norm", c.layer.dim);
  if (good && c.outputs)
    good = lunai_linear_init(&model->output, params, "", "output_projection", c.layer.dim, c.outputs, projection);
  lunai_lm_to_sizes(&c, &sizes);
  good = good && lunai_fields_describe(params, LUNAI_LM_KIND, &c.layer, lunai_lm_fields, LUNAI_LENGTH(lunai_lm_fields),
                                       &sizes);
  model->config = c;
  model->params = params;
  return lunai_setup_end(&s, good);
}

/* the context of a model whose init succeeded, where there is an input; else null */
LUNAI_FN luna_ctx *lunai_model_ctx(const luna_params *params, const luna_input *input, const char *name) {
  luna_ctx *ctx = lunai_ctx_of(params);
  if (ctx && !input) lunai_fail_null(ctx, name, "the input");
  return input ? ctx : NULL;
}
LUNAI_FN luna_ctx *lunai_pair_ctx(const luna_params *params, const luna_input *a, const luna_input *b,
                                  const char *name) {
  luna_ctx *ctx = lunai_model_ctx(params, a && b ? a : NULL, name);
  if (!ctx || a->batch == b->batch) return ctx;
  lunai_fail(ctx, LUNA_ERROR_BATCHES_DIFFER, name, a->batch, b->batch);
  return NULL;
}
/* what the logits are made of */
LUNAI_FN luna_tensor *lunai_lm_features(const luna_lm *model, const luna_input *input) {
  const luna_scope scope = luna_scope_begin(model->params->ctx);
  luna_tensor *x = model->embedding ? luna_embedding(model->embedding, input->tokens, input->batch, input->n) :
                                      luna_input_layer_forward(&model->input, input);
  int64_t i;
  x = lunai_result(scope, lunai_add_positions(x, model->config.positions, model->positions, 0));
  x = lunai_result(scope, luna_dropout(x, model->config.layer.dropout));
  for (i = 0; i < model->config.layers; i++) x = lunai_result(scope, luna_causal_layer_forward(&model->layers[i], x));
  return model->norm.weight ? lunai_result(scope, luna_norm_layer_forward(&model->norm, x)) : x;
}
LUNAI_FN luna_tensor *lunai_lm_output(const luna_lm *model) { /* the matrix of the logits */
  return model->output.weight ? model->output.weight : model->embedding;
}
LUNA_API luna_tensor *luna_lm_forward(const luna_lm *model, const luna_input *input) {
  luna_ctx *ctx = lunai_model_ctx(model ? model->params : NULL, input, "luna_lm_forward");
  const luna_scope scope = luna_scope_begin(ctx);
  if (!ctx) return NULL;
  return lunai_result(scope, luna_linear(lunai_lm_features(model, input), lunai_lm_output(model), model->output.bias));
}
LUNA_API luna_tensor *luna_lm_loss(const luna_lm *model, const luna_input *input, const int32_t *labels) {
  luna_ctx *ctx = lunai_model_ctx(model ? model->params : NULL, input, "luna_lm_loss");
  const luna_scope scope = luna_scope_begin(ctx);
  luna_tensor *x;
  if (!ctx) return NULL;
  if (!labels) return lunai_fail_null(ctx, "luna_lm_loss", "labels");
  x = lunai_lm_features(model, input);
  return lunai_result(scope, luna_linear_cross_entropy(x, lunai_lm_output(model), model->output.bias, labels, NULL));
}

/* --- the fields of models with an encoder --- */
#define LUNAI_MODEL_FIELDS(F) \
  F(vocab, 1, 1 << 24) F(layers, 1, 1024) F(dim, 1, 1 << 20) F(heads, 1, 1 << 16) F(pack_heads, 0, 1 << 16) F(ffn, 1, \
      1 << 22) F(memory, 1, 1 << 20) \
  F(sharing, 0, 3) F(activation, 1, LUNA_ACTIVATION_TANH) F(gated, 0, 1) F(omega, 0, 5) F(pre_norm, 0, 1) \
  F(attention, 0, 3) F(positions, 1, 3) F(max_length, 1, 1 << 26) F(first_position, 0, 1 << 26) \
  F(embedding_scale, 0, 2) F(norm_embedding, 0, 1) F(tied_layers, 0, 1) F(own_memory, 0, 1) F(keep_padding, 0, 1) \
  F(linformer_k, 0, 1 << 26) F(linformer_k_last_layer, 0, 1 << 26) F(linformer_k_last_head, 0, \
      1 << 26) F(linformer_sharing, 0, 2) F(linformer_projection, 0, 3) \
  F(classes, 0, 1 << 24) F(pooling, 0, 4) F(pre_logits, 0, 1 << 22) F(pair, 0, 1) \
  F(target_vocab, 0, 1 << 24) F(share_embeddings, 0, 1) F(separate_output, 0, 1) F(decoder_layers, 0, \
      1024) F(max_target_length, 0, 1 << 26) \
  F(features, 0, 1 << 20) F(per_step, 0, 1)
typedef struct lunai_model_sizes {
#define LUNAI_FIELD(name, min, max) int64_t name;
  LUNAI_MODEL_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
} lunai_model_sizes;
static const lunai_field lunai_model_fields[] = {
#define LUNAI_FIELD(name, min, max) { "luna." #name, offsetof(lunai_model_sizes, name), min, max },
  LUNAI_MODEL_FIELDS(LUNAI_FIELD)
#undef LUNAI_FIELD
};

LUNAI_FN void lunai_encoder_to_sizes(const luna_encoder_config *c, lunai_model_sizes *s) {
  const luna_linformer_config *l = &c->layer.linformer;
  memset(s, 0, sizeof *s);
  s->layers = c->layers; s->dim = c->dim; s->heads = c->heads; s->ffn = c->ffn; s->memory = c->memory;
  s->pack_heads = c->layer.pack_heads;
  s->sharing = c->layer.sharing; s->activation = c->layer.activation; s->gated = c->layer.gated;
  s->omega = c->layer.omega; s->pre_norm = c->layer.pre_norm; s->attention = c->layer.attention;
  s->positions = c->positions; s->max_length = c->max_length; s->first_position = c->first_position;
  s->embedding_scale = c->embedding_scale;
  s->norm_embedding = c->norm_embedding; s->tied_layers = c->tied_layers; s->own_memory = c->own_memory;
  s->keep_padding = c->keep_padding;
  s->linformer_k = l->k; s->linformer_k_last_layer = l->k_last_layer; s->linformer_k_last_head = l->k_last_head;
  s->linformer_sharing = l->sharing; s->linformer_projection = l->projection;
  s->features = c->features;
}
LUNAI_FN void lunai_encoder_from_sizes(const lunai_model_sizes *s, luna_encoder_config *c) {
  luna_linformer_config *l = &c->layer.linformer;
  memset(c, 0, sizeof *c);
  c->layers = s->layers; c->dim = s->dim; c->heads = s->heads; c->ffn = s->ffn; c->memory = s->memory;
  c->layer.pack_heads = s->pack_heads;
  c->layer.sharing = (luna_sharing)s->sharing; c->layer.activation = (luna_activation)s->activation;
  c->layer.omega = (luna_activation)s->omega;
  c->layer.pre_norm = s->pre_norm != 0; c->layer.gated = s->gated != 0;
  c->layer.attention = (luna_attention_kind)s->attention;
  c->positions = (luna_positions)s->positions; c->max_length = s->max_length; c->first_position = s->first_position;
  c->embedding_scale = (luna_embedding_scale)s->embedding_scale;
  c->norm_embedding = s->norm_embedding != 0; c->tied_layers = s->tied_layers != 0; c->own_memory = s->own_memory != 0;
  c->keep_padding = s->keep_padding != 0;
  l->k = s->linformer_k; l->k_last_layer = s->linformer_k_last_layer; l->k_last_head = s->linformer_k_last_head;
  l->sharing = (luna_linformer_sharing)s->linformer_sharing;
  l->projection = (luna_linformer_projection)s->linformer_projection;
  c->features = s->features;
}
LUNAI_FN bool lunai_model_good(luna_ctx *ctx, lunai_model_sizes *s) {
  return lunai_fields_good(ctx, lunai_model_fields, LUNAI_LENGTH(lunai_model_fields), s);
}
LUNAI_FN bool lunai_model_describe(luna_params *params, const char *kind, const luna_layer_config *layer,
                                   lunai_model_sizes *s) {
  return lunai_fields_describe(params, kind, layer, lunai_model_fields, LUNAI_LENGTH(lunai_model_fields), s);
}

/* --- encoder --- */
LUNAI_FN bool lunai_encoder_defaults(luna_ctx *ctx, const luna_encoder_config *config, luna_encoder_config *c) {
  luna_layer_config layer;
  if (config) *c = *config;
  else memset(c, 0, sizeof *c);
  if (c->layers == 0) c->layers = 2;
  if (c->memory == 0) c->memory = 16;
  if (c->positions == LUNA_POSITIONS_DEFAULT) c->positions = LUNA_POSITIONS_SINUSOIDAL;
  if (c->max_length == 0) c->max_length = 512;
  if (c->embedding_scale == LUNA_EMBEDDING_SCALE_DEFAULT)
    c->embedding_scale = c->positions == LUNA_POSITIONS_LEARNED ? LUNA_EMBEDDING_SCALE_ONE :
        LUNA_EMBEDDING_SCALE_SQRT_DIM;
  layer = c->layer;
  lunai_layer_sizes(&c->dim, &c->heads, &c->ffn, &layer);
  layer.own_memory = c->own_memory && lunai_is_luna(&layer) ? c->memory : 0;
  layer.linformer.max_length = c->max_length;
  if (!lunai_layer_config(ctx, &layer, LUNAI_ENCODER_LAYER, &layer)) return false;
  if (!lunai_agrees(ctx, "encoder.layer.dim", c->layer.dim, "encoder.dim", layer.dim) ||
      !lunai_agrees(ctx, "encoder.layer.heads", c->layer.heads, "encoder.heads", layer.heads) ||
      !lunai_agrees(ctx, "encoder.layer.ffn", c->layer.ffn, "encoder.ffn", layer.ffn) ||
      !(layer.own_memory ?
        lunai_agrees(ctx, "encoder.layer.own_memory", c->layer.own_memory, "encoder.memory", layer.own_memory) :
        lunai_is_unused(ctx, "encoder.layer.own_memory", c->layer.own_memory, "without encoder.own_memory")) ||
      !lunai_agrees(ctx, "encoder.layer.linformer.max_length", c->layer.linformer.max_length, "encoder.max_length",
                    c->max_length)) return false;
  c->layer = layer;
  c->ffn = layer.ffn;
  return c->layer.attention != LUNA_ATTENTION_LINFORMER || lunai_linformer_config(ctx, &c->layer.linformer);
}

/* A model's features are its encoder's. */
LUNAI_FN bool lunai_model_features(luna_ctx *ctx, int64_t *features, luna_encoder_config *encoder) {
  if (*features == 0) *features = encoder->features;
  if (!lunai_agrees(ctx, "encoder.features", encoder->features, "features", *features)) return false;
  encoder->features = *features;
  return true;
}

/* the learned embeddings and their norms */
LUNAI_FN bool lunai_encoder_embeddings(luna_encoder *e, luna_params *params, const char *prefix, int64_t vocab) {
  const luna_encoder_config *c = &e->config;
  const luna_init init = lunai_embedding_init(c->dim, c->layer.bert_init);
  if (lunai_is_luna(&c->layer) && !c->own_memory && (e->memory =
      lunai_named(params, prefix, "projected_embeddings", 2, c->memory, c->dim, init)) == NULL) return false;
  if (c->features ? !lunai_input_init(&e->input, params, prefix, c->features, c->dim,
                                      lunai_projection_init(c->layer.bert_init, true)) :
      (e->embedding = lunai_named(params, prefix, "embed_tokens.weight", 2, vocab, c->dim, init)) == NULL) return false;
  if (c->positions == LUNA_POSITIONS_LEARNED && (e->positions =
      lunai_named(params, prefix, "embed_positions.weight", 2, c->first_position + c->max_length, c->dim, init)) ==
          NULL) return false;
  if (!c->norm_embedding) return true;
  return lunai_norm_init(&e->embedding_norm, params, prefix, "emb_layer_norm", c->dim) &&
      (!e->memory || lunai_norm_init(&e->memory_embedding_norm, params, prefix, "proj_emb_layer_norm", c->dim));
}
LUNAI_FN bool lunai_encoder_layers(luna_encoder *e, luna_params *params, const char *prefix) {
  const luna_encoder_config *c = &e->config;
  const int64_t count = c->tied_layers ? 1 : c->layers;
  const bool layerwise = c->layer.attention == LUNA_ATTENTION_LINFORMER && !c->layer.hook &&
      c->layer.linformer.sharing == LUNA_LINFORMER_SHARING_LAYERWISE;
  luna_layer_config layer = c->layer;
  luna_tensor *shared = NULL;
  char name[LUNAI_MAX_NAME], number[32];
  void *memory;
  int64_t i;
  if (!lunai_layers_memory(params, count, sizeof(luna_encoder_layer), &memory)) return false;
  e->layers = (luna_encoder_layer *)memory;
  if (layerwise && !lunai_linformer_init(params, prefix, "e_proj", &c->layer.linformer, c->layer.linformer.k_last_layer,
                                         &shared)) return false;
  for (i = 0; i < count; i++) {
    lunai_print(number, sizeof number, "layers.%d.", i);
    layer.linformer.k = lunai_taper(c->layer.linformer.k, c->layer.linformer.k_last_layer, i, count);
    if (!lunai_name(params, name, prefix, number) || luna_encoder_layer_init(&e->layers[i], params, name,
        &layer) != LUNA_OK) return false;
    if (layerwise) e->layers[i].other_attention.e = e->layers[i].other_attention.f = shared;
  }
  return true;
}

LUNA_API luna_status luna_encoder_init(luna_encoder *e, luna_params *params, const char *prefix, int64_t vocab,
                                       const luna_encoder_config *config) {
  lunai_setup setup;
  lunai_model_sizes s;
  luna_encoder_config c;
  bool good;
  if (!lunai_setup_begin(&setup, "luna_encoder_init", params, prefix, e, sizeof *e))
    return lunai_setup_end(&setup, false);
  if (!lunai_encoder_defaults(params->ctx, config, &c)) return lunai_setup_end(&setup, false);
  if (vocab == 0) vocab = 256;
  lunai_encoder_to_sizes(&c, &s);
  s.vocab = vocab;
  if (!lunai_model_good(params->ctx, &s)) return lunai_setup_end(&setup, false);
  memset(e, 0, sizeof *e);
  e->config = c;
  e->params = params;
  good = lunai_encoder_embeddings(e, params, prefix, vocab) && lunai_encoder_layers(e, params, prefix);
  if (good && c.layer.pre_norm) {
    good = lunai_norm_init(&e->norm, params, prefix, "layer_norm", c.dim);
    if (lunai_is_luna(&c.layer))
      good = good && lunai_norm_init(&e->memory_norm, params, prefix, "proj_layer_norm", c.dim);
  }
  return lunai_setup_end(&setup, good);
}

LUNAI_FN float lunai_embedding_factor(const luna_encoder_config *c) {
  return c->embedding_scale == LUNA_EMBEDDING_SCALE_SQRT_DIM ? (float)sqrt((double)c->dim) : 1.0f;
}
/* tokens to s E[token] + position, or, without a table, features to their projection + position; zeros where padded */
LUNAI_FN luna_tensor *lunai_embed(const luna_encoder_config *c, luna_tensor *table, const luna_input_layer *features,
                                  luna_tensor *positions, const luna_norm_layer *norm, const luna_input *input) {
  const float factor = lunai_embedding_factor(c);
  const luna_scope scope = luna_scope_begin(table ? table->ctx : features->mean->ctx);
  luna_tensor *x = table ? luna_embedding(table, input->tokens, input->batch, input->n) :
                           luna_input_layer_forward(features, input);
  if (factor != 1 && table) x = lunai_result(scope, luna_scale(x, factor));
  x = lunai_result(scope, lunai_add_positions(x, c->positions, positions, c->first_position));
  if (c->keep_padding) x = lunai_result(scope, luna_mask(x, input->lengths));
  if (norm && norm->weight) x = lunai_result(scope, luna_norm_layer_forward(norm, x));
  x = lunai_result(scope, luna_dropout(x, c->layer.dropout));
  return c->keep_padding ? x : lunai_result(scope, luna_mask(x, input->lengths));
}
LUNAI_FN int64_t lunai_longest(const luna_input *input) {
  int64_t longest = input->lengths ? 1 : input->n, b;
  for (b = 0; input->lengths && b < input->batch; b++) longest = lunai_max(longest, input->lengths[b]);
  return lunai_min(longest, lunai_max(input->n, 1));
}

LUNA_API luna_tensor *luna_encoder_embed(const luna_encoder *e, const luna_input *input, luna_tensor **p) {
  luna_ctx *ctx = lunai_model_ctx(e ? e->params : NULL, input, "luna_encoder_embed");
  const luna_encoder_config *c;
  luna_tensor *memory;
  luna_scope scope;
  int64_t slots;
  float factor;
  if (!ctx) return NULL;
  scope = luna_scope_begin(ctx);
  c = &e->config;
  slots = lunai_min(c->memory, lunai_longest(input));
  factor = lunai_embedding_factor(c);
  memory = p && *p ? *p : e->memory;
  if (e->memory && !(p && *p)) {
    memory = luna_slice(memory, 0, 0, slots);
    if (factor != 1) memory = luna_scale(memory, factor);
    if (c->positions == LUNA_POSITIONS_SINUSOIDAL) memory = luna_add(memory, lunai_sinusoids(ctx, 0, slots, c->dim));
    if (e->memory_embedding_norm.weight) memory = luna_norm_layer_forward(&e->memory_embedding_norm, memory);
    memory = luna_dropout(luna_expand(memory, input->batch), c->layer.dropout);
    if (!c->keep_padding) memory = luna_mask(memory, input->lengths);
    if (!memory) return NULL;
  }
  if (p) *p = memory;
  return lunai_results(scope, lunai_embed(c, e->embedding, &e->input, e->positions, &e->embedding_norm, input), memory);
}

/* p: the memory that comes in, or null. *last_x and *last_p: what the last layer makes of both; last_x or last_p is
   null where its result is not wanted, and what only that needs is not computed. */
LUNAI_FN bool lunai_encoder(const luna_encoder *e, const luna_input *input, luna_tensor *p, luna_tensor **last_x,
                            luna_tensor **last_p) {
  luna_ctx *ctx = lunai_model_ctx(e ? e->params : NULL, input, "luna_encoder_forward");
  const luna_encoder_config *c;
  luna_tensor *x;
  luna_scope scope;
  int64_t i;
  bool has_x = true, has_p = false, is_luna, hands_p;
  if (!ctx) return false;
  c = &e->config;
  is_luna = lunai_is_luna(&c->layer);
  hands_p = is_luna || c->layer.hook;
  scope = luna_scope_begin(ctx);
  x = luna_encoder_embed(e, input, &p);
  for (i = 0; i < c->layers; i++) {
    has_x = last_x || i < c->layers - 1;
    has_p = hands_p && (i < c->layers - 1 ? !c->own_memory : last_p != NULL);
    if (!x || !lunai_encoder_layer(&e->layers[c->tied_layers ? 0 : i], scope, x, p, input->lengths, has_x ? &x : NULL,
                                   has_p ? &p : NULL)) return false;
    (void)lunai_results(scope, has_x ? x : p, has_p ? p : NULL);
  }
  if (has_p && e->memory_norm.weight) p = luna_norm_layer_forward(&e->memory_norm, p);
  if (has_x && e->norm.weight) x = luna_norm_layer_forward(&e->norm, x);
  if (has_x && !c->keep_padding) x = luna_mask(x, input->lengths);
  if ((has_x && !x) || (has_p && is_luna && !p)) return false;
  (void)lunai_results(scope, has_x ? x : p, has_p ? p : NULL);
  if (has_p) *last_p = p;
  if (has_x) *last_x = x;
  return true;
}
LUNA_API luna_tensor *luna_encoder_forward(const luna_encoder *e, const luna_input *input, luna_tensor **p) {
  luna_tensor *x = NULL;
  return lunai_encoder(e, input, p ? *p : NULL, &x, p) ? x : NULL;
}

/* --- classifier --- */
LUNAI_FN bool lunai_pools_memory(luna_pooling pooling) {
  return pooling == LUNA_POOLING_MEMORY || pooling == LUNA_POOLING_MEMORY_BATCH;
}
LUNAI_FN void lunai_classifier_sizes(const luna_classifier_config *c, lunai_model_sizes *s) {
  lunai_encoder_to_sizes(&c->encoder, s);
  s->vocab = c->vocab; s->classes = c->classes; s->pooling = c->pooling; s->pre_logits = c->pre_logits;
  s->pair = c->pair;
  s->per_step = c->per_step;
}
LUNA_API luna_status luna_classifier_init(luna_classifier *model, luna_params *params,
                                          const luna_classifier_config *config) {
  luna_classifier_config c;
  lunai_model_sizes s;
  lunai_setup setup;
  int64_t features;
  bool good, is_luna;
  if (!lunai_setup_begin(&setup, "luna_classifier_init", params, NULL, model, sizeof *model))
    return lunai_setup_end(&setup, false);
  if (config) c = *config;
  else memset(&c, 0, sizeof c);
  is_luna = lunai_is_luna(&c.encoder.layer);
  if (c.vocab == 0) c.vocab = 256;
  if (c.classes == 0) c.classes = 2;
  if (c.pooling == LUNA_POOLING_DEFAULT) c.pooling = is_luna ? LUNA_POOLING_MEMORY : LUNA_POOLING_MEAN;
  if (!is_luna && lunai_pools_memory(c.pooling)) {
    lunai_fail_status(params->ctx, LUNA_ERROR_POOLING_MEMORY);
    return lunai_setup_end(&setup, false);
  }
  if (!lunai_model_features(params->ctx, &c.features, &c.encoder) ||
      (c.per_step && !lunai_is_unused(params->ctx, "pair", c.pair, "with per_step")))
    return lunai_setup_end(&setup, false);
  if (!lunai_encoder_defaults(params->ctx, &c.encoder, &c.encoder)) return lunai_setup_end(&setup, false);
  lunai_classifier_sizes(&c, &s);
  if (!lunai_model_good(params->ctx, &s)) return lunai_setup_end(&setup, false);
  memset(model, 0, sizeof *model);
  features = c.encoder.dim * (c.pair ? 4 : 1);
  good = luna_encoder_init(&model->encoder, params, "encoder.", c.vocab, &c.encoder) == LUNA_OK;
  if (good && c.pre_logits)
    good = lunai_linear_init(&model->pre_logits, params, "", "pre_logits.0", features, c.pre_logits,
                             lunai_projection_init(c.encoder.layer.bert_init, true));
  if (good)
    model->projection = lunai_named(params, "", "sentence_projection_layer.weight", 2, c.classes,
        c.pre_logits ? c.pre_logits : features, lunai_projection_init(c.encoder.layer.bert_init, true));
  good = good && model->projection && lunai_model_describe(params, "classifier", &c.encoder.layer, &s);
  model->config = c;
  model->params = params;
  return lunai_setup_end(&setup, good);
}

/* mean over the first min(lengths[b], n) of each sequence's n rows, [batch, n, d] -> [batch, d]; 0 of none */
LUNAI_FN luna_tensor *lunai_mean_rows(luna_tensor *x, const int32_t *lengths) {
  int64_t b, shape[2];
  luna_tensor *y, *factors;
  void *memory;
  if (!x || !lengths) return luna_mean(x, 1);
  y = luna_sum(luna_mask(x, lengths), 1);
  shape[0] = x->shape[0];
  shape[1] = 1;
  if (!y) return NULL;
  if (!lunai_step(x->ctx, (size_t)shape[0] * sizeof(float), false, &memory))
    return lunai_fail_op_memory(x->ctx, "luna_classifier_pool", (size_t)shape[0] * sizeof(float));
  for (b = 0; b < shape[0]; b++) ((float *)memory)[b] = 1.0f / (float)lunai_max(1, lunai_min(lengths[b], x->shape[1]));
  factors = luna_tensor_new(x->ctx, (const float *)memory, 1, shape);
  return lunai_permute(luna_mul(lunai_permute(y, 1, 0, 2, 3), factors), 1, 0, 2, 3);
}
LUNA_API luna_tensor *luna_classifier_pool(const luna_classifier *model, luna_tensor *x, luna_tensor *p,
                                           const int32_t *lengths) {
  const bool memory = model && lunai_pools_memory(model->config.pooling);
  luna_tensor *rows = memory ? p : x;
  if (!lunai_layer_made(rows ? rows : x, model ? model->projection : NULL, "luna_classifier_pool")) return NULL;
  if (!rows) return lunai_fail_null(x->ctx, "luna_classifier_pool", "p");
  if (!lunai_is_sequence("luna_classifier_pool", memory ? "p" : "x", rows, rows->shape[0], model->config.encoder.dim))
    return NULL;
  switch (model->config.pooling) {
    case LUNA_POOLING_CLS: return x->shape[1] < 1 ? lunai_fail(x->ctx, LUNA_ERROR_POOL_EMPTY, x)
                                               : lunai_reshape(luna_slice(x, 1, 0, 1), 2, x->shape[0], x->shape[2], 1,
                                                               1);
    case LUNA_POOLING_MEMORY: return lunai_mean_rows(p, lengths);
    case LUNA_POOLING_MEMORY_BATCH: return luna_mean(p, 1);
    default: return lunai_mean_rows(x, lengths);
  }
}
LUNAI_FN luna_tensor *lunai_classifier_features(const luna_classifier *model, const luna_input *input) {
  const bool memory = lunai_pools_memory(model->config.pooling) && !model->config.per_step;
  const luna_scope scope = luna_scope_begin(model->params->ctx);
  luna_tensor *x = NULL, *p = NULL;
  if (!lunai_encoder(&model->encoder, input, NULL, memory ? NULL : &x, memory ? &p : NULL)) return NULL;
  if (model->config.per_step) return x;
  return lunai_result(scope, luna_classifier_pool(model, x, p, input->lengths));
}
LUNAI_FN luna_tensor *lunai_classifier_logits(const luna_classifier *model, luna_tensor *features) {
  if (model->pre_logits.weight)
    features = lunai_linear_activated(features, model->pre_logits.weight, model->pre_logits.bias, LUNA_ACTIVATION_GELU);
  return luna_linear(luna_dropout(features, model->config.encoder.layer.dropout), model->projection, NULL);
}
LUNA_API luna_tensor *luna_classifier_forward(const luna_classifier *model, const luna_input *input) {
  luna_ctx *ctx = lunai_model_ctx(model ? model->params : NULL, input, "luna_classifier_forward");
  if (!ctx) return NULL;
  if (model->config.pair)
    return lunai_fail(ctx, LUNA_ERROR_CLASSIFIER_PAIR);
  return lunai_classifier_logits(model, lunai_classifier_features(model, input));
}
LUNA_API luna_tensor *luna_classifier_forward_pair(const luna_classifier *model, const luna_input *first,
                                                   const luna_input *second) {
  luna_ctx *ctx = lunai_pair_ctx(model ? model->params : NULL, first, second, "luna_classifier_forward_pair");
  luna_tensor *part[4];
  if (!ctx) return NULL;
  if (!model->config.pair)
    return lunai_fail(ctx, LUNA_ERROR_CLASSIFIER_SINGLE);
  part[0] = lunai_classifier_features(model, first);
  part[1] = lunai_classifier_features(model, second);
  part[2] = luna_mul(part[0], part[1]);
  part[3] = luna_add(part[0], luna_scale(part[1], -1));
  return lunai_classifier_logits(model, luna_concat(part, 4, 1));
}

/* --- masked language model --- */
LUNA_API luna_status luna_masked_lm_init(luna_masked_lm *model, luna_params *params,
                                         const luna_masked_lm_config *config) {
  luna_masked_lm_config c;
  lunai_model_sizes s;
  lunai_setup setup;
  bool good;
  if (!lunai_setup_begin(&setup, "luna_masked_lm_init", params, NULL, model, sizeof *model))
    return lunai_setup_end(&setup, false);
  if (config) c = *config;
  else memset(&c, 0, sizeof c);
  if (c.vocab == 0) c.vocab = 257;
  if (!lunai_model_features(params->ctx, &c.features, &c.encoder)) return lunai_setup_end(&setup, false);
  if (!lunai_encoder_defaults(params->ctx, &c.encoder, &c.encoder)) return lunai_setup_end(&setup, false);
  lunai_encoder_to_sizes(&c.encoder, &s);
  s.vocab = c.vocab;
  memset(model, 0, sizeof *model);
  good = luna_encoder_init(&model->encoder, params, "encoder.", c.vocab, &c.encoder) == LUNA_OK;
  good = good && lunai_linear_init(&model->dense, params, "", "lm_head.dense", c.encoder.dim, c.encoder.dim,
                                   lunai_projection_init(c.encoder.layer.bert_init, true));
  good = good && lunai_norm_init(&model->norm, params, "", "lm_head.layer_norm", c.encoder.dim);
  if (good) model->bias = lunai_named(params, "", "lm_head.bias", 1, c.vocab, 1, lunai_init(LUNA_INIT_ZEROS, 0));
  if (good) model->output = !c.features ? model->encoder.embedding :
                            lunai_named(params, "", "lm_head.weight", 2, c.vocab, c.encoder.dim,
                                        lunai_embedding_init(c.encoder.dim, c.encoder.layer.bert_init));
  good = good && model->bias && model->output && lunai_model_describe(params, "masked_lm", &c.encoder.layer, &s);
  model->config = c;
  model->params = params;
  return lunai_setup_end(&setup, good);
}
/* what the logits are made of */
LUNAI_FN luna_tensor *lunai_masked_lm_head(const luna_masked_lm *model, luna_tensor *x) {
  if (!x) return NULL;
  return luna_norm_layer_forward(&model->norm, lunai_linear_activated(x, model->dense.weight, model->dense.bias,
                                                                      LUNA_ACTIVATION_GELU));
}
LUNA_API luna_tensor *luna_masked_lm_forward(const luna_masked_lm *model, const luna_input *input) {
  luna_tensor *x = model ? lunai_masked_lm_head(model, luna_encoder_forward(&model->encoder, input, NULL)) : NULL;
  return x ? luna_linear(x, model->output, model->bias) : NULL;
}
LUNA_API luna_tensor *luna_masked_lm_loss(const luna_masked_lm *model, const luna_input *input, const int32_t *labels) {
  luna_ctx *ctx = lunai_model_ctx(model ? model->params : NULL, input, "luna_masked_lm_loss");
  luna_tensor *x = ctx ? luna_encoder_forward(&model->encoder, input, NULL) : NULL;
  const int64_t vocab = model ? model->config.vocab : 0;
  int32_t *places, *chosen;
  int64_t i, all, count = 0;
  void *memory;
  if (!x) return NULL;
  all = input->batch * input->n;
  if (!labels) return lunai_fail_null(ctx, "luna_masked_lm_loss", "labels");
  for (i = 0; i < all; i++) {
    count += labels[i] >= 0;
    if (labels[i] >= vocab)
      return lunai_fail(ctx, LUNA_ERROR_LABEL_RANGE, "luna_masked_lm_loss", i, (int64_t)labels[i], vocab);
  }
  if (count == 0) return lunai_fail(ctx, LUNA_ERROR_NO_LABELS, all);
  if (!lunai_step(ctx, (size_t)(2 * count) * sizeof(int32_t), false, &memory))
    return lunai_fail_op_memory(ctx, "luna_masked_lm_loss", (size_t)(2 * count) * sizeof(int32_t));
  places = (int32_t *)memory;
  chosen = places + count;
  for (count = 0, i = 0; i < all; i++)
    if (labels[i] >= 0) {
      places[count] = (int32_t)i;
      chosen[count++] = labels[i];
    }
  /* the rows at those places */
  x = luna_embedding(lunai_reshape(x, 2, all, model->config.encoder.dim, 1, 1), places, 1, count);
  return luna_linear_cross_entropy(lunai_masked_lm_head(model, x), model->output, model->bias, chosen, NULL);
}

LUNA_API int64_t luna_mask_tokens(const luna_masking *masking, const luna_input *input, int32_t *masked,
                                  int32_t *labels) {
  luna_masking m;
  double p;
  int64_t b, i, count = 0;
  memset(&m, 0, sizeof m);
  if (masking) m = *masking;
  if (m.mask == 0 && m.vocab == 0) m.mask = 256;
  if (m.vocab <= 0) m.vocab = m.mask;
  p = m.probability != 0 ? (double)m.probability : 0.15;
  if (!input || !input->tokens || !masked || !labels || !(p >= 0 && p <= 1) ||
      lunai_checked(input->batch, input->n) <= 0)
    return 0;
  for (b = 0; b < input->batch; b++)
    for (i = 0; i < input->n; i++) {
      const int64_t at = b * input->n + i;
      const int32_t token = input->tokens[at];
      uint32_t counter[4], word[4];
      counter[0] = (uint32_t)at;
      counter[1] = (uint32_t)((uint64_t)at >> 32) ^ (uint32_t)(m.step >> 32) << 16;
      counter[2] = 0x4D61736Bu;      /* distinct from other uses of the seed */
      counter[3] = (uint32_t)m.step;
      lunai_philox(counter, m.seed, word);
      masked[at] = token;
      labels[at] = -1;
      if ((input->lengths && i >= input->lengths[b]) || (double)word[0] >= p * 4294967296.0) continue;
      labels[at] = token;
      count++;
      if (word[1] % 10 < 8) masked[at] = m.mask;
      else if (word[1] % 10 == 8) masked[at] = m.vocab > 0 ? (int32_t)(word[2] % (uint32_t)m.vocab) : token;
    }
  return count;
}

/* --- encoder-decoder --- */
LUNAI_FN void lunai_seq2seq_sizes(const luna_seq2seq_config *c, lunai_model_sizes *s) {
  lunai_encoder_to_sizes(&c->encoder, s);
  s->vocab = c->vocab; s->target_vocab = c->target_vocab; s->share_embeddings = c->share_embeddings;
  s->separate_output = c->separate_output;
  s->decoder_layers = c->decoder_layers; s->max_target_length = c->max_target_length;
}
LUNAI_FN bool lunai_seq2seq_defaults(luna_ctx *ctx, luna_seq2seq_config *c) {
  lunai_model_sizes s;
  if (c->vocab == 0) c->vocab = 256;
  if (c->target_vocab == 0) c->target_vocab = c->vocab;
  if (c->encoder.embedding_scale == LUNA_EMBEDDING_SCALE_DEFAULT)
    c->encoder.embedding_scale = LUNA_EMBEDDING_SCALE_SQRT_DIM;
  if (!lunai_is_luna(&c->encoder.layer) || c->encoder.own_memory) {
    lunai_fail_status(ctx, LUNA_ERROR_LUNA_ONLY, ctx->call, "an encoder-decoder");
    return false;
  }
  if (c->share_embeddings && c->vocab != c->target_vocab) {
    lunai_fail_status(ctx, LUNA_ERROR_SHARED_VOCAB, ctx->call, c->vocab, c->target_vocab);
    return false;
  }
  if (!lunai_model_features(ctx, &c->features, &c->encoder) || !lunai_encoder_defaults(ctx, &c->encoder, &c->encoder) ||
      (c->features && !lunai_is_unused(ctx, "share_embeddings", c->share_embeddings, "with features"))) return false;
  if (c->decoder_layers == 0) c->decoder_layers = c->encoder.layers;
  if (c->max_target_length == 0) c->max_target_length = c->encoder.max_length;
  lunai_seq2seq_sizes(c, &s);
  return lunai_model_good(ctx, &s);
}
LUNAI_FN bool lunai_decoder_init(luna_seq2seq *model, luna_params *params, const luna_seq2seq_config *c) {
  const int64_t d = c->encoder.dim;
  const luna_init init = lunai_embedding_init(d, c->encoder.layer.bert_init);
  char prefix[48];
  void *memory;
  int64_t i;
  model->embedding = c->share_embeddings ? model->encoder.embedding :
      lunai_named(params, "decoder.", "embed_tokens.weight", 2, c->target_vocab, d, init);
  if (!model->embedding) return false;
  if (c->encoder.positions == LUNA_POSITIONS_LEARNED && (model->positions =
      lunai_named(params, "decoder.", "embed_positions.weight", 2, c->encoder.first_position + c->max_target_length, d,
                  init)) == NULL) return false;
  if (!lunai_layers_memory(params, c->decoder_layers, sizeof(luna_decoder_layer), &memory)) return false;
  model->layers = (luna_decoder_layer *)memory;
  for (i = 0; i < c->decoder_layers; i++) {
    lunai_print(prefix, sizeof prefix, "decoder.layers.%d.", i);
    if (luna_decoder_layer_init(&model->layers[i], params, prefix, &c->encoder.layer) != LUNA_OK) return false;
  }
  if (c->encoder.layer.pre_norm && !(lunai_norm_init(&model->norm, params, "decoder.", "layer_norm", d) &&
      lunai_norm_init(&model->memory_norm, params, "decoder.", "proj_layer_norm", d))) return false;
  model->output = c->separate_output ? lunai_named(params, "decoder.", "output_projection.weight", 2, c->target_vocab,
                                                   d, init) : model->embedding;
  return model->output != NULL;
}
LUNA_API luna_status luna_seq2seq_init(luna_seq2seq *model, luna_params *params, const luna_seq2seq_config *config) {
  luna_seq2seq_config c;
  lunai_model_sizes s;
  lunai_setup setup;
  bool good;
  if (!lunai_setup_begin(&setup, "luna_seq2seq_init", params, NULL, model, sizeof *model))
    return lunai_setup_end(&setup, false);
  if (config) c = *config;
  else memset(&c, 0, sizeof c);
  if (!lunai_seq2seq_defaults(params->ctx, &c)) return lunai_setup_end(&setup, false);
  lunai_seq2seq_sizes(&c, &s);
  memset(model, 0, sizeof *model);
  good = luna_encoder_init(&model->encoder, params, "encoder.", c.vocab, &c.encoder) == LUNA_OK &&
      lunai_decoder_init(model, params, &c);
  good = good && lunai_model_describe(params, "seq2seq", &c.encoder.layer, &s);
  model->config = c;
  model->params = params;
  return lunai_setup_end(&setup, good);
}

LUNA_API luna_tensor *luna_seq2seq_forward(const luna_seq2seq *model, const luna_input *source,
                                           const luna_input *target) {
  luna_ctx *ctx = lunai_pair_ctx(model ? model->params : NULL, source, target, "luna_seq2seq_forward");
  luna_tensor *p = NULL, *context, *x;
  luna_encoder_config c;
  luna_scope scope, inner;
  int64_t i;
  bool has_p;
  if (!ctx) return NULL;
  scope = luna_scope_begin(ctx);
  context = luna_encoder_forward(&model->encoder, source, &p);
  c = model->config.encoder;
  c.keep_padding = true;             /* padding of the target: a zero embedding, no more */
  x = context ? lunai_embed(&c, model->embedding, NULL, model->positions, NULL, target) : NULL;
  inner = luna_scope_begin(ctx);      /* the encoder's results stay */
  for (i = 0; i < model->config.decoder_layers && x; i++) {
    has_p = i < model->config.decoder_layers - 1; /* the last layer's P' has no reader */
    x = lunai_decoder_layer(&model->layers[i], x, p, context, source->lengths, has_p ? &p : NULL, NULL);
    x = lunai_results(inner, x, p);
  }
  if (model->norm.weight) x = luna_norm_layer_forward(&model->norm, x);
  return lunai_result(scope, luna_linear(x, model->output, NULL));
}
/* ---------------------------------------------------------------------------------------------------------------------
   >>trainer: schedules and optimisers. Guarded by tests/trainer.c.
   ------------------------------------------------------------------------------------------------------------------ */
#ifndef LUNA_NO_TRAIN
LUNA_API float luna_schedule_at(const luna_schedule *schedule, int64_t step) {
  static const luna_schedule constant = { LUNA_DECAY_CONSTANT, 0, 0, 0, 0, { 0, 0, 0, 0 }, 0 };
  const luna_schedule *s = schedule ? schedule : &constant;
  const double t = (double)step, warmup = (double)s->warmup, total = (double)s->total, floor = (double)s->floor,
      from = (double)s->warmup_from;
  const double gamma = s->gamma == 0 ? 0.1 : (double)s->gamma;
  double factor = 1, done;
  int i;
  if (step < s->warmup) return (float)(from + (1 - from) * t / warmup);
  done = total > warmup ? (t - warmup) / (total - warmup) : 1;
  if (done > 1) done = 1;
  if (s->decay == LUNA_DECAY_INVERSE_SQRT) factor = sqrt((warmup > 1 ? warmup : 1) / (t > 1 ? t : 1));
  if (s->decay == LUNA_DECAY_LINEAR) factor = 1 - done * (1 - floor);
  if (s->decay == LUNA_DECAY_COSINE) factor = floor + (1 - floor) * 0.5 * (1 + cos(3.14159265358979323846 * done));
  for (i = 0; s->decay == LUNA_DECAY_MILESTONES && i < 4; i++)
    if (s->milestone[i] > 0 && step > s->milestone[i]) factor *= gamma;
  return (float)(factor > floor ? factor : floor);
}

/* a parameter, and how it is trained */
typedef struct lunai_trained {
  luna_tensor *tensor;
  const char *name;
  float *moment[3];
  float lr, decay;
  bool frozen;
} lunai_trained;
typedef struct lunai_group { luna_param_group group; struct lunai_group *next; } lunai_group;
struct luna_optimizer {
  luna_params *params;
  luna_optimizer_kind kind;
  luna_adamw_config config;          /* SGD ignores betas and epsilon, Apollo beta2 */
  bool nesterov;
  float momentum;
  int moments;                       /* tensors beside each parameter */
  int64_t attempts, size, reached;
  lunai_trained *trained;            /* [size] */
  luna_update *parts, *table;        /* [reached] of those that have a gradient; the same in backend memory */
  lunai_group *groups;               /* in the order they were given, for parameters that join later */
  luna_step_state *state;            /* in backend memory */
  uint64_t backwards;                /* the context's, at the last step */
  uint64_t skipped_in_row;           /* the state's, as far as the host knows */
  luna_optimizer *next;              /* of the context */
};

LUNAI_FN bool lunai_group_fits(const luna_param_group *group, const lunai_trained *t) {
  return (!group->name || strstr(t->name, group->name)) &&
         (group->max_rank <= 0 || t->tensor->rank <= group->max_rank);
}
LUNAI_FN void lunai_group_set(const luna_param_group *group, lunai_trained *t) {
  if (!lunai_group_fits(group, t)) return;
  t->lr = group->lr == 0 ? 1.0f : group->lr;
  t->decay = group->weight_decay;
  t->frozen = group->frozen;
}
/* Adds the set's parameters from index `size` on, with moments of zeros: all, or none where memory ends */
LUNAI_FN luna_status lunai_optimizer_join(luna_optimizer *o, const char *name) {
  luna_ctx *ctx = o->params->ctx;
  const int64_t size = o->params->size;
  const lunai_persistent_mark mark = lunai_persistent(ctx);
  const lunai_group *group;
  void *trained, *parts, *table = NULL, *moment;
  lunai_trained *t;
  lunai_param *p;
  bool good;
  int i;
  if (o->trained && o->size >= size) return LUNA_OK;
  good = lunai_persist(ctx, (size_t)size * sizeof(lunai_trained), false, &trained) &&
         lunai_persist(ctx, (size_t)size * sizeof(luna_update), false, &parts) &&
         (!ctx->backend->allocate || lunai_persist(ctx, (size_t)size * sizeof(luna_update), true, &table));
  if (good && o->size) memcpy(trained, o->trained, (size_t)o->size * sizeof(lunai_trained));
  for (p = o->params->first; p && good; p = p->next) {
    if (p->index < o->size) continue;
    t = (lunai_trained *)trained + p->index;
    t->tensor = &p->tensor;
    t->name = p->name;
    t->lr = 1;
    t->decay = o->config.weight_decay;
    for (group = o->groups; group; group = group->next) lunai_group_set(&group->group, t);
    for (i = 0; i < o->moments && good; i++) {
      good = lunai_persist(ctx, (size_t)luna_count(t->tensor) * sizeof(float), true, &moment);
      t->moment[i] = (float *)moment;
    }
  }
  if (!good) {
    lunai_persistent_rewind(ctx, mark);
    return lunai_fail_memory(ctx, name, (size_t)luna_params_element_count(o->params) * sizeof(float));
  }
  o->trained = (lunai_trained *)trained;
  o->parts = (luna_update *)parts;
  o->table = (luna_update *)(table ? table : parts);
  o->reached = 0;
  o->size = size;
  return LUNA_OK;
}

/* whether a config is valid; false with a sentence */
LUNAI_FN bool lunai_optimizer_good(luna_ctx *ctx, const luna_optimizer *o, const char *name) {
  const luna_adamw_config *c = &o->config;
  const luna_schedule *s = &c->schedule;
  const bool total = s->decay == LUNA_DECAY_LINEAR || s->decay == LUNA_DECAY_COSINE;
  if (!lunai_is_rate(ctx, name, "lr", c->lr) || !lunai_is_rate(ctx, name, "weight_decay", c->weight_decay) ||
      !lunai_is_rate(ctx, name, "epsilon", c->epsilon) || !lunai_is_rate(ctx, name, "momentum", o->momentum) ||
      !(c->clip >= 0 || lunai_is_rate(ctx, name, "clip", c->clip))) return false;
  if (o->nesterov && o->momentum == 0) return lunai_fail_status(ctx, LUNA_ERROR_NESTEROV, name) == LUNA_OK;
  return lunai_is_probability(ctx, name, "beta1", c->beta1) && lunai_is_probability(ctx, name, "beta2", c->beta2) &&
         lunai_is_rate(ctx, name, "schedule.floor", s->floor) && lunai_is_rate(ctx, name, "schedule.gamma", s->gamma) &&
         lunai_is_rate(ctx, name, "schedule.warmup_from", s->warmup_from) &&
         lunai_in(ctx, name, "schedule.decay", (int64_t)s->decay, 0, LUNA_DECAY_MILESTONES) &&
         (!total || lunai_in(ctx, name, "schedule.total", s->total, 1, INT64_MAX));
}

LUNAI_FN luna_optimizer *lunai_optimizer_open(luna_params *params, const luna_optimizer *like, const char *name) {
  luna_ctx *ctx = lunai_ctx_of(params);
  lunai_persistent_mark mark;
  luna_status status;
  luna_optimizer *o = NULL;
  void *memory, *state;
  if (!ctx) return NULL;
  mark = lunai_persistent(ctx);
  if (params->borrowing) status = lunai_fail_status(ctx, LUNA_ERROR_SET_BORROWED, name);
  else if (ctx->open_status != LUNA_OK || !lunai_optimizer_good(ctx, like, name))
    status = ctx->open_status != LUNA_OK ? ctx->open_status : ctx->last_status;
  else if (!lunai_persist(ctx, sizeof(luna_optimizer), false, &memory) ||
           !lunai_persist(ctx, sizeof(luna_step_state), !ctx->options.measure, &state))
    status = lunai_fail_memory(ctx, name, sizeof(luna_optimizer));
  else {
    o = (luna_optimizer *)memory;
    *o = *like;
    o->params = params;
    o->state = (luna_step_state *)state;
    status = lunai_optimizer_join(o, name);
  }
  lunai_remember(ctx, params, 0, status);
  if (status != LUNA_OK) {
    lunai_persistent_rewind(ctx, mark);
    return NULL;
  }
  o->next = ctx->optimizers;
  return ctx->optimizers = o;
}

LUNA_API luna_optimizer *luna_sgd(luna_params *params, const luna_sgd_config *config) {
  luna_optimizer o;
  memset(&o, 0, sizeof o);
  if (config) {
    o.config.lr = config->lr;
    o.config.weight_decay = config->weight_decay;
    o.config.clip = config->clip;
    o.config.schedule = config->schedule;
    o.config.max_skips = config->max_skips;
    o.momentum = config->momentum;
    o.nesterov = config->nesterov;
  }
  if (o.config.lr == 0) o.config.lr = 0.01f;
  o.moments = o.momentum != 0;
  return lunai_optimizer_open(params, &o, "luna_sgd");
}

LUNAI_FN luna_optimizer *lunai_adam(luna_params *params, const luna_adamw_config *config, luna_optimizer_kind kind,
                                    const char *name) {
  luna_optimizer o;
  memset(&o, 0, sizeof o);
  if (config) o.config = *config;
  if (o.config.lr == 0) o.config.lr = 1e-3f;
  if (o.config.beta1 == 0) o.config.beta1 = 0.9f;
  if (o.config.beta2 == 0) o.config.beta2 = 0.999f;
  if (o.config.epsilon == 0) o.config.epsilon = 1e-8f;
  o.kind = kind;
  o.moments = 2;
  return lunai_optimizer_open(params, &o, name);
}
LUNA_API luna_optimizer *luna_adam(luna_params *params, const luna_adam_config *config) {
  return lunai_adam(params, config, LUNA_OPTIMIZER_ADAM, "luna_adam");
}
LUNA_API luna_optimizer *luna_adamw(luna_params *params, const luna_adamw_config *config) {
  return lunai_adam(params, config, LUNA_OPTIMIZER_ADAMW, "luna_adamw");
}

LUNA_API luna_optimizer *luna_apollo(luna_params *params, const luna_apollo_config *config) {
  luna_optimizer o;
  memset(&o, 0, sizeof o);
  if (config) {
    o.config.lr = config->lr;
    o.config.beta1 = config->beta;
    o.config.epsilon = config->epsilon;
    o.config.weight_decay = config->weight_decay;
    o.config.clip = config->clip;
    o.config.schedule = config->schedule;
    o.config.max_skips = config->max_skips;
  }
  if (o.config.lr == 0) o.config.lr = 1;
  if (o.config.beta1 == 0) o.config.beta1 = 0.9f;
  if (o.config.epsilon == 0) o.config.epsilon = 1e-4f;
  if (o.config.schedule.warmup == 0) o.config.schedule.warmup = 100;
  if (o.config.schedule.warmup_from == 0) o.config.schedule.warmup_from = 0.01f;
  o.kind = LUNA_OPTIMIZER_APOLLO;
  o.moments = 3;
  return lunai_optimizer_open(params, &o, "luna_apollo");
}

/* as the last of the optimiser's groups, in place of an earlier one that fits the same parameters; false: no memory */
LUNAI_FN bool lunai_group_keep(luna_optimizer *o, const luna_param_group *group) {
  luna_ctx *ctx = o->params->ctx;
  const lunai_persistent_mark mark = lunai_persistent(ctx);
  const char *name = group->name ? group->name : "";
  lunai_group **at = &o->groups, *kept;
  void *memory;
  while (*at && ((*at)->group.max_rank != group->max_rank || strcmp((*at)->group.name, name) != 0)) at = &(*at)->next;
  kept = *at;
  if (kept) {
    *at = kept->next;
    name = kept->group.name;
  } else {
    if (!lunai_persist(ctx, sizeof *kept, false, &memory)) return false;
    kept = (lunai_group *)memory;
    name = lunai_persist_text(ctx, name, "");
    if (!name) return lunai_persistent_rewind(ctx, mark), false;
  }
  kept->group = *group;
  kept->group.name = name;             /* "" is in every name */
  kept->next = NULL;
  for (at = &o->groups; *at; at = &(*at)->next);
  *at = kept;
  return true;
}
LUNA_API luna_status luna_optimizer_group(luna_optimizer *o, const luna_param_group *group) {
  luna_ctx *ctx = o ? o->params->ctx : NULL;
  int64_t i, matched = 0;
  luna_status status;
  if (!o) return LUNA_BAD_ARGUMENT;
  if (!lunai_is_given(ctx, "luna_optimizer_group", "group", group != NULL) ||
      !lunai_is_rate(ctx, "luna_optimizer_group", "lr", group->lr) ||
      !lunai_is_rate(ctx, "luna_optimizer_group", "weight_decay", group->weight_decay)) return ctx->last_status;
  status = lunai_optimizer_join(o, "luna_optimizer_group");
  if (status != LUNA_OK) return status;
  for (i = 0; i < o->size; i++) matched += lunai_group_fits(group, &o->trained[i]);
  if (!matched)
    return lunai_fail_status(ctx, LUNA_ERROR_GROUP_EMPTY, group->name ? group->name : "", (int64_t)group->max_rank);
  if (!lunai_group_keep(o, group)) return lunai_fail_memory(ctx, "luna_optimizer_group", sizeof(lunai_group));
  for (i = 0; i < o->size; i++) lunai_group_set(group, &o->trained[i]);
  return LUNA_OK;
}

/* a failed call stops an optimiser; another optimiser's LUNA_NOT_FINITE does not */
LUNAI_FN luna_status lunai_optimizer_stopped(const luna_optimizer *o) {
  const luna_status status = o->params->ctx->status;
  return status == LUNA_NOT_FINITE ? LUNA_OK : status;
}
LUNAI_FN luna_status lunai_optimizer_finite(luna_optimizer *o) {
  const int64_t max = o->config.max_skips == 0 ? 10 : o->config.max_skips;
  if (max < 0 || o->skipped_in_row < (uint64_t)max) return LUNA_OK;
  return lunai_fail_status(o->params->ctx, LUNA_ERROR_SKIPPED_STEPS, (int64_t)o->skipped_in_row, o->attempts);
}
LUNAI_FN void lunai_look_at_optimizers(luna_ctx *ctx, bool skipped) {
  luna_optimizer *o;
  for (o = ctx->optimizers; o; o = o->next)
    if (skipped || o->skipped_in_row > 0) o->skipped_in_row = lunai_state_of(ctx, o->state).skipped_in_row;
}

LUNAI_FN float lunai_scheduled_lr(const luna_optimizer *o, int64_t attempt) {
  return o->config.lr * luna_schedule_at(&o->config.schedule, attempt + (o->kind != LUNA_OPTIMIZER_APOLLO));
}
LUNA_API luna_status luna_optimizer_advance(luna_optimizer *o) {
  luna_ctx *ctx;
  luna_status status;
  float lr;
  if (!o) return LUNA_BAD_ARGUMENT;
  ctx = o->params->ctx;
  status = lunai_optimizer_stopped(o);
  if (status != LUNA_OK || ctx->options.measure) return status;
  ctx->unread = true;
  lr = lunai_scheduled_lr(o, o->attempts++);
  status = ctx->backend->copy(ctx, &o->state->lr, &lr, sizeof lr, 1);
  return lunai_backend_result(ctx, "luna_optimizer_advance", status);
}
/* the parts of those parameters that have a gradient; what changed goes to the device */
LUNAI_FN luna_status lunai_optimizer_parts(luna_optimizer *o) {
  luna_ctx *ctx = o->params->ctx;
  int64_t i, reached = 0, first = 0;
  bool changed = false;
  for (i = 0; i < o->size; i++) {
    const lunai_trained *t = &o->trained[i];
    luna_update part;
    if (!t->tensor->grad) continue;
    memset(&part, 0, sizeof part);
    part.value = t->tensor->data;
    part.grad = t->tensor->grad;
    memcpy(part.moment, t->moment, sizeof part.moment);
    part.count = luna_count(t->tensor);
    part.first = first;
    part.decay = t->decay;
    part.lr = t->lr;
    part.frozen = t->frozen;
    first += lunai_divide_up(part.count, LUNA_UPDATE_PIECE);
    changed = changed || reached >= o->reached || memcmp(&o->parts[reached], &part, sizeof part) != 0;
    memcpy(&o->parts[reached++], &part, sizeof part);
  }
  o->reached = reached;
  if (!changed || o->table == o->parts) return LUNA_OK;
  return ctx->backend->copy(ctx, o->table, o->parts, (size_t)reached * sizeof *o->parts, 1);
}
LUNA_API luna_status luna_optimizer_apply(luna_optimizer *o) {
  luna_ctx *ctx;
  luna_rule rule;
  luna_status status;
  if (!o) return LUNA_BAD_ARGUMENT;
  ctx = o->params->ctx;
  status = lunai_optimizer_stopped(o);
  if (status == LUNA_OK) status = lunai_optimizer_join(o, "luna_optimizer_step");
  if (status != LUNA_OK) return status;
  o->backwards = ctx->backwards;
  if (ctx->options.measure) return LUNA_OK;
  memset(&rule, 0, sizeof rule);
  rule.kind = o->kind;
  rule.nesterov = o->nesterov;
  rule.momentum = o->momentum;
  rule.beta1 = o->config.beta1;
  rule.beta2 = o->config.beta2;
  rule.epsilon = o->config.epsilon;
  rule.clip = o->config.clip;
  rule.state = o->state;
  status = lunai_optimizer_parts(o);
  if (status == LUNA_OK) status = ctx->backend->norm(ctx, &rule, o->parts, o->table, o->reached);
  if (status == LUNA_OK) status = ctx->backend->update(ctx, &rule, o->parts, o->table, o->reached);
  ctx->stepped = ctx->unread = true;
  if (status != LUNA_OK) return lunai_backend_result(ctx, "luna_optimizer_step", status);
  if (!lunai_on_device(ctx)) o->skipped_in_row = o->state->skipped_in_row;
  return lunai_optimizer_finite(o);
}
LUNA_API luna_status luna_optimizer_step(luna_optimizer *o) {
  luna_status status;
  if (!o) return LUNA_BAD_ARGUMENT;
  status = lunai_optimizer_stopped(o);
  if (status == LUNA_OK && o->backwards == o->params->ctx->backwards)
    return lunai_fail_status(o->params->ctx, LUNA_ERROR_NO_BACKWARD);
  if (status == LUNA_OK) status = lunai_optimizer_join(o, "luna_optimizer_step");
  if (status == LUNA_OK) status = luna_optimizer_advance(o);
  return status == LUNA_OK ? luna_optimizer_apply(o) : status;
}

LUNA_API luna_status luna_optimizer_set_lr(luna_optimizer *o, float lr) {
  if (!o) return LUNA_BAD_ARGUMENT;
  if (!lunai_is_rate(o->params->ctx, "luna_optimizer_set_lr", "lr", lr)) return o->params->ctx->last_status;
  o->config.lr = lr;
  return LUNA_OK;
}
LUNA_API float luna_optimizer_lr(const luna_optimizer *o) {
  return o ? lunai_scheduled_lr(o, lunai_max(o->attempts, 1) - 1) : 0;
}
LUNAI_FN luna_step_state lunai_optimizer_state(const luna_optimizer *o) {
  luna_step_state none;
  memset(&none, 0, sizeof none);
  return o ? lunai_state_of(o->params->ctx, o->state) : none;
}
LUNA_API int64_t luna_optimizer_steps(const luna_optimizer *o) { return (int64_t)lunai_optimizer_state(o).updates; }
LUNA_API int64_t luna_optimizer_skipped(const luna_optimizer *o) { return (int64_t)lunai_optimizer_state(o).skipped; }
LUNA_API float luna_optimizer_norm(const luna_optimizer *o) { return lunai_optimizer_state(o).norm; }
#else
LUNAI_FN void lunai_look_at_optimizers(luna_ctx *ctx, bool skipped) { (void)ctx, (void)skipped; }
#endif /* !LUNA_NO_TRAIN */

/* ---------------------------------------------------------------------------------------------------------------------
   >>checkpoints: parameter sets to and from safetensors. Guarded by tests/checkpoints.c.
   ------------------------------------------------------------------------------------------------------------------ */
typedef struct lunai_saving { luna_ctx *ctx; luna_io io; } lunai_saving;
LUNAI_FN bool lunai_save_write(void *user, const void *bytes, size_t size) {
  const luna_io *io = &((lunai_saving *)user)->io;
  return io->write(io->user, bytes, size);
}
LUNAI_FN bool lunai_save_fetch(void *user, float *out, const float *from, int64_t count) {
  luna_ctx *ctx = ((lunai_saving *)user)->ctx;
  return ctx->backend->copy(ctx, out, from, (size_t)count * sizeof(float), 2) == LUNA_OK;
}

/* what a file holds besides a set's parameters and pairs */
typedef struct lunai_extras {
  const lunai_st_pair *pairs; const lunai_st_source *sources; int64_t pair_count, count;
} lunai_extras;

LUNAI_FN luna_status lunai_save(const luna_params *params, const lunai_extras *extras, const luna_io *io,
                                const char *name) {
  lunai_st_writer writer;
  lunai_st_pair *pairs;
  lunai_st_source *sources;
  const lunai_mark mark = lunai_step_mark(params->ctx);
  lunai_meta *m;
  lunai_param *p;
  void *memory = NULL, *more = NULL;
  int64_t pair_count = extras->pair_count, count = extras->count;
  lunai_saving saving;
  if (params->ctx->call) name = params->ctx->call;
  for (m = params->metas; m; m = m->next) pair_count++;
  if (!lunai_step(params->ctx, (size_t)pair_count * sizeof *pairs, false, &memory) ||
      !lunai_step(params->ctx, (size_t)(params->size + count) * sizeof *sources, false, &more)) {
    lunai_step_rewind(params->ctx, mark);
    return lunai_fail_memory(params->ctx, name, (size_t)(params->size + count) * sizeof *sources);
  }
  pairs = (lunai_st_pair *)memory;
  sources = (lunai_st_source *)more;
  if (extras->pair_count) memcpy(pairs, extras->pairs, (size_t)extras->pair_count * sizeof *pairs);
  for (pair_count = extras->pair_count, m = params->metas; m; m = m->next, pair_count++) {
    pairs[pair_count].key = m->key;
    pairs[pair_count].value = m->value;
  }
  for (count = 0, p = params->first; p; p = p->next, count++) {
    sources[count].name = p->name;
    sources[count].rank = p->tensor.rank;
    sources[count].shape = p->tensor.shape;
    sources[count].data = p->tensor.data;
  }
  if (extras->count) memcpy(sources + count, extras->sources, (size_t)extras->count * sizeof *sources);
  if (params->ctx->options.measure) {
    lunai_step_rewind(params->ctx, mark);
    return LUNA_OK;
  }
  saving.ctx = params->ctx;
  saving.io = *io;
  memset(&writer, 0, sizeof writer);
  writer.write = lunai_save_write;
  writer.fetch = lunai_on_device(params->ctx) ? lunai_save_fetch : NULL;
  writer.user = &saving;
  lunai_st_write(&writer, pairs, pair_count, sources, count + extras->count);
  lunai_step_rewind(params->ctx, mark);
  if (!writer.failed) return LUNA_OK;
  return lunai_fail_status(params->ctx, LUNA_ERROR_WRITE_FAILED, name, lunai_file_name(params->ctx));
}
LUNA_API luna_status luna_save_io(const luna_params *params, const luna_io *io) {
  lunai_extras none;
  if (!params) return LUNA_BAD_ARGUMENT;
  if (!io || !io->write)
    return lunai_fail_status(params->ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_save_io", io ? "io->write" : "io");
  memset(&none, 0, sizeof none);
  return lunai_save(params, &none, io, "luna_save_io");
}

/* the parameter a tensor of a file belongs to, or null */
LUNAI_FN lunai_param *lunai_param_of(const luna_params *params, const lunai_st_tensor *t) {
  char name[LUNAI_MAX_PARAM_NAME];
  const size_t size = lunai_st_decode(t->name, name, sizeof name);
  /* a name with a zero byte in it is no parameter's */
  return size < sizeof name && strlen(name) == size ? lunai_param_find(params, name) : NULL;
}
LUNAI_FN luna_status lunai_load_check(luna_params *params, const lunai_st *st) {
  luna_ctx *ctx = params->ctx;
  const char *file = lunai_file_name(ctx);
  lunai_st_tensor t;
  size_t cursor = 0;
  int64_t matched = 0;
  lunai_param *p;
  while (lunai_st_next(st, &cursor, &t)) {
    char name[80];
    if (lunai_st_ours(t.name)) continue;
    lunai_st_decode(t.name, name, sizeof name);
    p = lunai_param_of(params, &t);
    if (!p) return lunai_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_EXTRA, ctx->call, name, file);
    if (!lunai_st_like(&t, &p->tensor))
      return lunai_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_SHAPE, ctx->call, name, &p->tensor, file);
    if (!lunai_st_is_real(&t))
      return lunai_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_MISSING, ctx->call, file, name, &p->tensor);
    matched++;
  }
  for (p = params->first; p && matched < params->size; p = p->next)
    if (!lunai_st_find(st, p->name, &t))
      return lunai_fail_status(ctx, LUNA_ERROR_FILE_TENSOR_MISSING, ctx->call, file, p->name, &p->tensor);
  return LUNA_OK;
}
/* All of the file's text pairs or none, in its order, but for those that begin with "luna.", which describe the
   model, and keys with a zero byte, which no string can hold. */
LUNAI_FN luna_status lunai_load_pairs(luna_params *params, const lunai_st *st) {
  lunai_meta *pairs, *pair, **link = &params->metas;
  lunai_st_text key, value;
  size_t cursor = 0, size = st->pairs * sizeof *pairs;
  void *memory;
  char *text;
  if (st->pairs == 0) return LUNA_OK;
  while (lunai_st_meta_next(st, &cursor, &key, &value)) size += key.size + value.size + 2; /* no longer when decoded */
  if (!lunai_persist(params->ctx, size, false, &memory)) return lunai_fail_memory(params->ctx, params->ctx->call, size);
  pairs = pair = (lunai_meta *)memory;
  text = (char *)(pairs + st->pairs);
  for (params->last_meta = NULL; *link;) { /* removes the pairs that the file has */
    if (!lunai_is_ours((*link)->key) && lunai_st_meta(st, (*link)->key, &value)) *link = (*link)->next;
    else link = &(params->last_meta = *link)->next;
  }
  for (cursor = 0; lunai_st_meta_next(st, &cursor, &key, &value);) {
    const size_t length = lunai_st_decode(key, text, key.size + 1);
    if (lunai_is_ours(text) || strlen(text) != length) continue;
    pair->key = text;
    pair->value = text += length + 1;
    text += lunai_st_decode(value, text, value.size + 1) + 1;
    *link = params->last_meta = pair;
    link = &pair++->next;
  }
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_load_st(luna_params *params, const lunai_st *st) {
  luna_ctx *ctx = params->ctx;
  luna_status status = params->borrowing ? lunai_fail_status(ctx, LUNA_ERROR_SET_BORROWED, ctx->call) :
                       lunai_load_check(params, st);
  if (status == LUNA_OK) status = lunai_load_pairs(params, st);
  lunai_st_tensor t;
  size_t cursor = 0;
  while (status == LUNA_OK && !ctx->options.measure && lunai_st_next(st, &cursor, &t))
    if (!lunai_st_ours(t.name)) status = lunai_fill(ctx, lunai_param_of(params, &t)->tensor.data, &t);
  return status;
}

/* An open file, with its index in the step; closing releases both. */
typedef struct lunai_file {
  lunai_st st;
  luna_ctx *ctx;
  lunai_mark mark;
  lunai_chunk *last;
  const char *outer;                 /* for lunai_leave */
} lunai_file;
LUNAI_FN luna_status lunai_file_close(const lunai_file *f, luna_status status) {
  lunai_arena *arena = &f->ctx->arena[0];
  lunai_chunk **newer = f->last ? &f->last->next : &arena->steps;
  lunai_step_rewind(f->ctx, f->mark);
  while (*newer) lunai_chunk_close(newer, f->ctx->options.allocator, f->ctx->backend, f->ctx->self);
  if (!f->last) arena->step = NULL;
  lunai_leave(f->ctx, f->outer);
  return status;
}
LUNAI_FN luna_status lunai_file_open(luna_ctx *ctx, lunai_file *f, const void *bytes, size_t size, const char *name) {
  lunai_chunk *chunk;
  const char *wrong;
  void *index;
  f->ctx = ctx;
  f->outer = lunai_enter(ctx, name);
  f->mark = lunai_step_mark(ctx);
  for (f->last = NULL, chunk = ctx->arena[0].steps; chunk; chunk = chunk->next) f->last = chunk;
  wrong = bytes || size == 0 ? lunai_st_open(&f->st, bytes, size) : "bytes is null";
  if (!wrong) {
    const size_t need = (f->st.tensors + f->st.pairs + 1) * sizeof(uint64_t);
    if (!lunai_step(ctx, need, false, &index)) return lunai_file_close(f, lunai_fail_memory(ctx, ctx->call, need));
    wrong = lunai_st_index(&f->st, (uint64_t *)index, (uint64_t *)index + f->st.tensors);
  }
  if (!wrong) return LUNA_OK;
  lunai_fail_status(ctx, LUNA_ERROR_NOT_SAFETENSORS, ctx->call, lunai_file_name(ctx), wrong);
  return lunai_file_close(f, ctx->last_status);
}

LUNA_API luna_status luna_load_bytes(luna_params *params, const void *bytes, size_t size) {
  lunai_file file;
  luna_status status;
  if (!params) return LUNA_BAD_ARGUMENT;
  status = lunai_file_open(params->ctx, &file, bytes, size, "luna_load_bytes");
  return status == LUNA_OK ? lunai_file_close(&file, lunai_load_st(params, &file.st)) : status;
}

LUNAI_FN luna_status lunai_load_borrowed(luna_params *params, lunai_st *st) {
  uint64_t *names = params->source.names;
  lunai_param *p;
  luna_error_id wrong;
  void *memory;
  if (params->shared) return lunai_fail_status(params->ctx, LUNA_ERROR_SET_BORROWED, "luna_load_borrowed");
  for (p = params->first; p; p = p->next) {
    lunai_borrowed(params, p->name, &p->tensor, st, &wrong);
    if (wrong) return lunai_fail_status(params->ctx, (int)wrong, "luna_load_borrowed", p->name, &p->tensor);
  }
  if (params->source.tensors < st->tensors) { /* room for the index, which stays */
    const size_t size = st->tensors * sizeof *names;
    if (!lunai_persist(params->ctx, size, false, &memory))
      return lunai_fail_memory(params->ctx, "luna_load_borrowed", size);
    names = (uint64_t *)memory;
  }
  if (st->tensors) memcpy(names, st->names, st->tensors * sizeof *names);
  params->borrowing = true;
  params->source = *st;
  params->source.names = names;
  params->source.keys = NULL;
  for (p = params->first; p; p = p->next) lunai_borrow(p, lunai_borrowed(params, p->name, &p->tensor, st, &wrong));
  return LUNA_OK;
}
LUNA_API luna_status luna_load_borrowed(luna_params *params, const void *bytes, size_t size) {
  lunai_file file;
  luna_status status;
  if (!params) return LUNA_BAD_ARGUMENT;
  status = lunai_file_open(params->ctx, &file, bytes, size, "luna_load_borrowed");
  return status == LUNA_OK ? lunai_file_close(&file, lunai_load_borrowed(params, &file.st)) : status;
}

LUNAI_FN void lunai_entry_of(const lunai_st_tensor *t, const char *name, luna_file_tensor *entry) {
  int a;
  memset(entry, 0, sizeof *entry);
  entry->name = name;
  entry->dtype = lunai_st_formats[t->dtype].name;
  entry->rank = t->rank;
  for (a = 0; a < t->rank && a < 8; a++) entry->shape[a] = t->shape[a];
  entry->count = t->count;
  entry->data = t->data;
  entry->bytes = t->bytes;
}
LUNA_API bool luna_file_tensor_read(const luna_file_tensor *entry, float *out) {
  lunai_st_tensor t;
  memset(&t, 0, sizeof t);
  if (!entry || !entry->dtype || !out) return false;
  while (t.dtype < LUNAI_ST_DTYPES && strcmp(lunai_st_formats[t.dtype].name, entry->dtype) != 0) t.dtype++;
  t.count = entry->count;
  t.data = (const uint8_t *)entry->data;
  t.bytes = entry->bytes;
  return t.dtype < LUNAI_ST_DTYPES && lunai_st_floats(&t, out);
}
/* a JSON string of the file as text in the step; null when there is no memory */
LUNAI_FN const char *lunai_step_text(luna_ctx *ctx, lunai_st_text text) {
  const size_t size = lunai_st_decode(text, NULL, 0) + 1;
  void *memory;
  if (!lunai_step(ctx, size, false, &memory)) return lunai_fail_memory(ctx, ctx->call, size), (const char *)NULL;
  lunai_st_decode(text, (char *)memory, size);
  return (const char *)memory;
}
LUNAI_FN luna_status lunai_inspect(luna_ctx *ctx, const lunai_st *st, const luna_inspection *inspection) {
  const lunai_mark mark = lunai_step_mark(ctx);
  luna_status status = LUNA_OK;
  lunai_st_tensor t;
  lunai_st_text key, value;
  luna_file_tensor entry;
  size_t cursor = 0;
  while (status == LUNA_OK && inspection->pair && lunai_st_meta_next(st, &cursor, &key, &value)) {
    const char *k = lunai_step_text(ctx, key), *v = k ? lunai_step_text(ctx, value) : NULL;
    if (v) inspection->pair(inspection->user, k, v);
    else status = LUNA_OUT_OF_MEMORY;
    lunai_step_rewind(ctx, mark);
  }
  cursor = 0;
  while (status == LUNA_OK && inspection->tensor && lunai_st_next(st, &cursor, &t)) {
    const char *name = lunai_step_text(ctx, t.name);
    if (name) {
      lunai_entry_of(&t, name, &entry);
      inspection->tensor(inspection->user, &entry);
    } else status = LUNA_OUT_OF_MEMORY;
    lunai_step_rewind(ctx, mark);
  }
  return status;
}
LUNA_API luna_status luna_inspect_bytes(luna_ctx *ctx, const void *bytes, size_t size,
                                        const luna_inspection *inspection) {
  lunai_file file;
  luna_status status;
  if (!ctx || !inspection) return LUNA_BAD_ARGUMENT;
  status = lunai_file_open(ctx, &file, bytes, size, "luna_inspect_bytes");
  return status == LUNA_OK ? lunai_file_close(&file, lunai_inspect(ctx, &file.st, inspection)) : status;
}

LUNAI_FN luna_status lunai_load_matching(luna_params *params, const lunai_st *st, luna_load_report *m) {
  char name[LUNAI_MAX_PARAM_NAME];
  luna_status status = LUNA_OK;
  lunai_st_tensor t;
  lunai_param *p;
  size_t cursor = 0;
  if (params->borrowing) return lunai_fail_status(params->ctx, LUNA_ERROR_SET_BORROWED, params->ctx->call);
  m->loaded = m->missing = m->unused = 0;
  for (p = params->first; p && status == LUNA_OK; p = p->next) {
    const char *why = !lunai_st_find(st, p->name, &t) ? "is not in the file" : !lunai_st_like(&t, &p->tensor) ?
        "has another shape in the file" : lunai_st_is_real(&t) ? NULL : "is not stored as real numbers";
    if (!why) m->loaded++;
    if (!why && !params->ctx->options.measure) status = lunai_fill(params->ctx, p->tensor.data, &t);
    if (why) m->missing++;
    if (why && m->report) m->report(m->user, p->name, why);
  }
  if (status != LUNA_OK) return status;
  while (lunai_st_next(st, &cursor, &t)) {
    if (lunai_st_ours(t.name) || lunai_param_of(params, &t)) continue;
    m->unused++;
    lunai_st_decode(t.name, name, sizeof name);
    if (m->report) m->report(m->user, name, "is in the file and no parameter here");
  }
  if (m->loaded) return LUNA_OK;
  return lunai_fail_status(params->ctx, LUNA_ERROR_NOTHING_MATCHES, params->ctx->call, params->size,
                           lunai_file_name(params->ctx));
}
LUNA_API luna_status luna_load_matching_bytes(luna_params *params, const void *bytes, size_t size,
                                              luna_load_report *report) {
  luna_load_report none;
  lunai_file file;
  luna_status status;
  if (!params) return LUNA_BAD_ARGUMENT;
  memset(&none, 0, sizeof none);
  status = lunai_file_open(params->ctx, &file, bytes, size, "luna_load_matching_bytes");
  if (status != LUNA_OK) return status;
  return lunai_file_close(&file, lunai_load_matching(params, &file.st, report ? report : &none));
}

/* Loads a model: its init takes each parameter's values from the file, and fails where the file has none of that
   name and shape; then the file may have no more. False: a sentence says why. */
LUNAI_FN void lunai_fill_begin(luna_params *params, const lunai_st *st) {
  if (!params->borrowing) params->filling = st;
}
LUNAI_FN bool lunai_fill_end(const lunai_setup *s, const lunai_st *st, luna_status status) {
  const int64_t count = lunai_st_tensors(st), made = s->params->size - s->count;
  s->params->filling = NULL;
  if (status == LUNA_OK && made != count)
    status = lunai_fail_status(s->params->ctx, LUNA_ERROR_FILE_TENSOR_COUNT, s->params->ctx->call,
                               lunai_file_name(s->params->ctx), count, made);
  return status == LUNA_OK && (s->params->borrowing || lunai_load_pairs(s->params, st) == LUNA_OK);
}

LUNAI_FN bool lunai_lm_load_st(luna_lm *model, const lunai_setup *s, const lunai_st *st) {
  luna_ctx *ctx = s->params->ctx;
  lunai_lm_sizes sizes;
  luna_lm_config config;
  const char *wrong = lunai_lm_read(st, &sizes);
  if (wrong) return lunai_fail_status(ctx, LUNA_ERROR_NOT_A_MODEL, ctx->call, lunai_file_name(ctx), wrong) == LUNA_OK;
  lunai_lm_from_sizes(&sizes, &config);
  wrong = lunai_dropouts_read(st, &config.layer);
  if (wrong) return lunai_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, wrong, lunai_file_name(ctx)) == LUNA_OK;
  lunai_fill_begin(s->params, st);
  return lunai_fill_end(s, st, luna_lm_init(model, s->params, &config));
}
LUNA_API luna_status luna_lm_load_bytes(luna_lm *model, luna_params *params, const void *bytes, size_t size) {
  lunai_setup s;
  lunai_file file;
  bool good = lunai_setup_begin(&s, "luna_lm_load_bytes", params, NULL, model, sizeof *model);
  good = good && lunai_file_open(params->ctx, &file, bytes, size, "luna_lm_load_bytes") == LUNA_OK;
  if (good) {
    good = lunai_lm_load_st(model, &s, &file.st);
    lunai_file_close(&file, LUNA_OK);
  }
  return lunai_setup_end(&s, good);
}

LUNAI_FN luna_status lunai_model_init(luna_model *model, luna_params *params, luna_model_kind kind,
                                      const lunai_model_sizes *s, const luna_layer_config *dropouts) {
  luna_classifier_config classifier;
  luna_masked_lm_config masked_lm;
  luna_seq2seq_config seq2seq;
  luna_encoder_config encoder;
  lunai_encoder_from_sizes(s, &encoder);
  encoder.layer.dropout = dropouts->dropout; encoder.layer.attention_dropout = dropouts->attention_dropout;
  encoder.layer.activation_dropout = dropouts->activation_dropout;
  memset(&classifier, 0, sizeof classifier);
  memset(&masked_lm, 0, sizeof masked_lm);
  memset(&seq2seq, 0, sizeof seq2seq);
  classifier.encoder = masked_lm.encoder = seq2seq.encoder = encoder;
  classifier.vocab = masked_lm.vocab = seq2seq.vocab = s->vocab;
  classifier.classes = s->classes; classifier.pooling = (luna_pooling)s->pooling; classifier.pre_logits = s->pre_logits;
  classifier.pair = s->pair != 0;
  classifier.per_step = s->per_step != 0;
  seq2seq.target_vocab = s->target_vocab; seq2seq.share_embeddings = s->share_embeddings != 0;
  seq2seq.separate_output = s->separate_output != 0;
  seq2seq.decoder_layers = s->decoder_layers; seq2seq.max_target_length = s->max_target_length;
  if (kind == LUNA_MODEL_CLASSIFIER) return luna_classifier_init(&model->classifier, params, &classifier);
  if (kind == LUNA_MODEL_MASKED_LM) return luna_masked_lm_init(&model->masked_lm, params, &masked_lm);
  return luna_seq2seq_init(&model->seq2seq, params, &seq2seq);
}
LUNAI_FN bool lunai_model_load_st(luna_model *model, const lunai_setup *s, const lunai_st *st) {
  static const char *const kinds[] = { "classifier", "masked_lm", "seq2seq" };
  luna_params *params = s->params;
  luna_ctx *ctx = params->ctx;
  const char *file = lunai_file_name(ctx);
  lunai_model_sizes sizes;
  lunai_st_text kind;
  luna_layer_config dropouts;
  const char *wrong;
  int64_t count;
  int k = 0;
  if (params->size) return lunai_fail_status(ctx, LUNA_ERROR_SET_NOT_EMPTY, ctx->call, params->size) == LUNA_OK;
  if (!lunai_st_meta(st, "luna.kind", &kind))
    return lunai_fail_status(ctx, LUNA_ERROR_NOT_A_MODEL, ctx->call, file, LUNAI_NO_KIND) == LUNA_OK;
  model->kind = LUNA_MODEL_LM;
  if (lunai_st_equal(kind, LUNAI_LM_KIND)) return lunai_lm_load_st(&model->lm, s, st);
  while (k < 3 && !lunai_st_equal(kind, kinds[k])) k++;
  if (k == 3)
    return lunai_fail_status(ctx, LUNA_ERROR_NOT_A_MODEL, ctx->call, file, "its luna.kind is unknown") == LUNA_OK;
  wrong = lunai_fields_read(st, lunai_model_fields, LUNAI_LENGTH(lunai_model_fields), &sizes);
  if (!wrong) wrong = lunai_dropouts_read(st, &dropouts);
  if (wrong) return lunai_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, wrong, file) == LUNA_OK;
  count = lunai_st_tensors(st);
  if ((!sizes.tied_layers && sizes.layers > count) || sizes.decoder_layers > count)
    return lunai_fail_status(ctx, LUNA_ERROR_NOT_A_MODEL, ctx->call, file,
                             "its tensors are not those of luna.layers layers") == LUNA_OK;
  model->kind = (luna_model_kind)(LUNA_MODEL_CLASSIFIER + k);
  lunai_fill_begin(params, st);
  return lunai_fill_end(s, st, lunai_model_init(model, params, model->kind, &sizes, &dropouts));
}
LUNA_API luna_status luna_load_model_bytes(luna_model *model, luna_params *params, const void *bytes, size_t size) {
  lunai_setup s;
  lunai_file file;
  bool good = lunai_setup_begin(&s, "luna_load_model_bytes", params, NULL, model, sizeof *model);
  if (good) memset(model, 0, sizeof *model);
  good = good && lunai_file_open(params->ctx, &file, bytes, size, "luna_load_model_bytes") == LUNA_OK;
  if (good) {
    good = lunai_model_load_st(model, &s, &file.st);
    lunai_file_close(&file, LUNA_OK);
  }
  return lunai_setup_end(&s, good);
}

/* --- training: the optimiser's moments as tensors "luna.moment<i>.<name>", its counters and the context's as pairs, 16
   hexadecimal digits each --- */
#ifndef LUNA_NO_TRAIN
static const char *const lunai_training_keys[] = { "luna.optimizer", "luna.attempts", "luna.updates", "luna.skipped",
                                                 "luna.lr", "luna.step", "luna.seed", "luna.skipped_in_row" };
enum { LUNAI_TRAINING_KIND, LUNAI_TRAINING_ATTEMPTS, LUNAI_TRAINING_UPDATES, LUNAI_TRAINING_SKIPPED, LUNAI_TRAINING_LR,
       LUNAI_TRAINING_STEP, LUNAI_TRAINING_SEED, LUNAI_TRAINING_ROW, LUNAI_TRAINING_KEYS };
#define LUNAI_MOMENT_NAME 14           /* "luna.moment1." and a name's end */

LUNAI_FN void lunai_hex(uint64_t value, char out[17]) {
  int i;
  for (i = 0; i < 16; i++) out[i] = "0123456789abcdef"[value >> (60 - 4 * i) & 15];
  out[16] = 0;
}
LUNAI_FN bool lunai_unhex(const lunai_st *st, const char *key, uint64_t *out) {
  lunai_st_text value;
  size_t i;
  *out = 0;
  if (!lunai_st_meta(st, key, &value) || value.size != 16) return false;
  for (i = 0; i < 16; i++) {
    const char c = value.at[i];
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
    *out = *out << 4 | (uint64_t)(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  return true;
}
/* a float's bits as a number, the same on machines of either byte order */
LUNAI_FN uint64_t lunai_float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
LUNAI_FN float lunai_bits_float(uint64_t value) {
  uint32_t bits;
  float x;
  bits = (uint32_t)(value & UINT32_MAX);
  memcpy(&x, &bits, sizeof bits);
  return x;
}
LUNAI_FN void lunai_moment_name(char *out, int moment, const char *name) {
  memcpy(out, "luna.moment1.", LUNAI_MOMENT_NAME - 1);
  out[11] = (char)('1' + moment);
  memcpy(out + LUNAI_MOMENT_NAME - 1, name, strlen(name) + 1);
}

LUNA_API luna_status luna_save_training_io(const luna_optimizer *o, const luna_io *io) {
  char text[LUNAI_TRAINING_KEYS][17];
  uint64_t value[LUNAI_TRAINING_KEYS];
  lunai_st_pair pairs[LUNAI_TRAINING_KEYS];
  lunai_st_source *sources;
  luna_step_state state;
  lunai_extras extras;
  lunai_mark mark;
  luna_ctx *ctx;
  luna_status status;
  void *memory = NULL, *name = NULL;
  int64_t i, count = 0;
  int k;
  bool good;
  if (!o) return LUNA_BAD_ARGUMENT;
  ctx = o->params->ctx;
  if (!io || !io->write)
    return lunai_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_save_training_io", io ? "io->write" : "io");
  status = lunai_optimizer_join((luna_optimizer *)(uintptr_t)o, "luna_save_training"); /* zeros, for who loads it */
  if (status != LUNA_OK) return status;
  state = lunai_optimizer_state(o);
  memset(value, 0, sizeof value);
  value[LUNAI_TRAINING_KIND] = (uint64_t)o->kind;
  value[LUNAI_TRAINING_ATTEMPTS] = (uint64_t)o->attempts;
  value[LUNAI_TRAINING_UPDATES] = state.updates;
  value[LUNAI_TRAINING_SKIPPED] = state.skipped;
  value[LUNAI_TRAINING_ROW] = state.skipped_in_row;
  value[LUNAI_TRAINING_LR] = lunai_float_bits(o->config.lr);
  state = lunai_state_of(ctx, ctx->state);
  value[LUNAI_TRAINING_STEP] = state.step;
  value[LUNAI_TRAINING_SEED] = state.seed;
  for (k = 0; k < LUNAI_TRAINING_KEYS; k++) {
    lunai_hex(value[k], text[k]);
    pairs[k].key = lunai_training_keys[k];
    pairs[k].value = text[k];
  }
  mark = lunai_step_mark(ctx);
  good = lunai_step(ctx, (size_t)(o->size * o->moments) * sizeof *sources, false, &memory);
  sources = (lunai_st_source *)memory;
  for (i = 0; i < o->size && good; i++)
    for (k = 0; k < o->moments && good; k++) {
      good = lunai_step(ctx, LUNAI_MOMENT_NAME + strlen(o->trained[i].name), false, &name);
      if (!good) break;
      lunai_moment_name((char *)name, k, o->trained[i].name);
      sources[count].name = (const char *)name;
      sources[count].rank = o->trained[i].tensor->rank;
      sources[count].shape = o->trained[i].tensor->shape;
      sources[count++].data = o->trained[i].moment[k];
    }
  extras.pairs = pairs;
  extras.pair_count = LUNAI_TRAINING_KEYS;
  extras.sources = sources;
  extras.count = count;
  if (good) status = lunai_save(o->params, &extras, io, "luna_save_training_io");
  else status = lunai_fail_memory(ctx, "luna_save_training", (size_t)(o->size * o->moments) * sizeof *sources);
  lunai_step_rewind(ctx, mark);
  return status;
}

/* finds a moment; *wrong says why there is none */
LUNAI_FN bool lunai_moment_find(const lunai_st *st, const lunai_trained *t, int moment, lunai_st_tensor *out) {
  char name[LUNAI_MAX_PARAM_NAME + LUNAI_MOMENT_NAME];
  lunai_moment_name(name, moment, t->name);
  return lunai_st_find(st, name, out) && lunai_st_like(out, t->tensor) && out->dtype == LUNAI_ST_F32;
}
LUNAI_FN luna_status lunai_training_check(luna_optimizer *o, const lunai_st *st, uint64_t value[LUNAI_TRAINING_KEYS]) {
  luna_ctx *ctx = o->params->ctx;
  const char *file = lunai_file_name(ctx);
  lunai_st_tensor t;
  lunai_st_text text;
  size_t cursor = 0;
  int64_t i, count = 0;
  float lr;
  int k;
  for (k = 0; k < LUNAI_TRAINING_KEYS; k++)
    if (!lunai_unhex(st, lunai_training_keys[k], &value[k]) &&
        (k != LUNAI_TRAINING_ROW || lunai_st_meta(st, lunai_training_keys[k], &text))) /* which older files lack */
      return lunai_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, lunai_training_keys[k], file);
  if (value[LUNAI_TRAINING_KIND] != (uint64_t)o->kind)
    return lunai_fail_status(ctx, LUNA_ERROR_OPTIMIZER_KIND, ctx->call, file, (int64_t)value[LUNAI_TRAINING_KIND],
                             (int64_t)o->kind);
  lr = lunai_bits_float(value[LUNAI_TRAINING_LR]);
  if (value[LUNAI_TRAINING_LR] >> 32 || !(lr >= 0 && lr < (float)INFINITY))
    return lunai_fail_status(ctx, LUNA_ERROR_FILE_FIELD, ctx->call, lunai_training_keys[LUNAI_TRAINING_LR], file);
  if (value[LUNAI_TRAINING_ATTEMPTS] >> 62 || value[LUNAI_TRAINING_UPDATES] > value[LUNAI_TRAINING_ATTEMPTS] ||
      value[LUNAI_TRAINING_UPDATES] + value[LUNAI_TRAINING_SKIPPED] != value[LUNAI_TRAINING_ATTEMPTS] ||
      value[LUNAI_TRAINING_ROW] > value[LUNAI_TRAINING_SKIPPED])
    return lunai_fail_status(ctx, LUNA_ERROR_FILE_COUNTERS, ctx->call, file, (int64_t)value[LUNAI_TRAINING_ATTEMPTS],
                             (int64_t)value[LUNAI_TRAINING_UPDATES], (int64_t)value[LUNAI_TRAINING_SKIPPED],
                             (int64_t)value[LUNAI_TRAINING_ROW]);
  while (lunai_st_next(st, &cursor, &t)) count += lunai_st_ours(t.name);
  if (count != o->size * o->moments)
    return lunai_fail_status(ctx, LUNA_ERROR_MOMENT_COUNT, ctx->call, file, count, o->size * o->moments);
  for (i = 0; i < o->size; i++)
    for (k = 0; k < o->moments; k++)
      if (!lunai_moment_find(st, &o->trained[i], k, &t))
        return lunai_fail_status(ctx, LUNA_ERROR_MOMENT, ctx->call, (int64_t)k + 1, o->trained[i].name, file);
  return LUNA_OK;
}
LUNAI_FN luna_status lunai_load_training(luna_optimizer *o, const lunai_st *st) {
  luna_ctx *ctx = o->params->ctx;
  uint64_t value[LUNAI_TRAINING_KEYS];
  luna_step_state state;
  lunai_st_tensor t;
  luna_status status;
  int64_t i;
  int k;
  status = lunai_optimizer_join(o, "luna_load_training");
  if (status == LUNA_OK) status = lunai_training_check(o, st, value);
  if (status == LUNA_OK) status = lunai_load_st(o->params, st);
  if (status == LUNA_OK) status = luna_params_zero_grad(o->params); /* pending gradients belong to no step of that
                                                                       run */
  if (status != LUNA_OK || ctx->options.measure) return status;
  for (i = 0; i < o->size; i++)
    for (k = 0; k < o->moments && status == LUNA_OK; k++)
      if (lunai_moment_find(st, &o->trained[i], k, &t)) status = lunai_fill(ctx, o->trained[i].moment[k], &t);
  if (status != LUNA_OK) return status;
  state = lunai_optimizer_state(o);
  state.updates = value[LUNAI_TRAINING_UPDATES];
  state.skipped = value[LUNAI_TRAINING_SKIPPED];
  state.skipped_in_row = o->skipped_in_row = value[LUNAI_TRAINING_ROW];
  o->attempts = (int64_t)value[LUNAI_TRAINING_ATTEMPTS];
  o->config.lr = lunai_bits_float(value[LUNAI_TRAINING_LR]);
  status = ctx->backend->copy(ctx, o->state, &state, sizeof state, 1);
  state = lunai_state_of(ctx, ctx->state);
  state.step = value[LUNAI_TRAINING_STEP];
  state.seed = value[LUNAI_TRAINING_SEED];
  return status == LUNA_OK ? ctx->backend->copy(ctx, ctx->state, &state, sizeof state, 1) : status;
}
LUNA_API luna_status luna_load_training_bytes(luna_optimizer *o, const void *bytes, size_t size) {
  lunai_file file;
  luna_status status;
  if (!o) return LUNA_BAD_ARGUMENT;
  status = lunai_file_open(o->params->ctx, &file, bytes, size, "luna_load_training_bytes");
  return status == LUNA_OK ? lunai_file_close(&file, lunai_load_training(o, &file.st)) : status;
}
LUNAI_FN luna_status lunai_load_trained(void *optimizer, luna_params *params, const void *bytes, size_t size) {
  (void)params;
  return luna_load_training_bytes((luna_optimizer *)optimizer, bytes, size);
}
#endif /* !LUNA_NO_TRAIN */

/* --- the same through luna_io, and by path --- */
typedef luna_status (*lunai_loader)(void *into, luna_params *params, const void *bytes, size_t size);
LUNAI_FN luna_status lunai_load_values(void *into, luna_params *params, const void *bytes, size_t size) {
  (void)into;
  return luna_load_bytes(params, bytes, size);
}
LUNAI_FN luna_status lunai_load_lm(void *model, luna_params *params, const void *bytes, size_t size) {
  return luna_lm_load_bytes((luna_lm *)model, params, bytes, size);
}
LUNAI_FN luna_status lunai_load_any(void *model, luna_params *params, const void *bytes, size_t size) {
  return luna_load_model_bytes((luna_model *)model, params, bytes, size);
}
typedef struct lunai_inspect_call { luna_ctx *ctx; const luna_inspection *inspection; } lunai_inspect_call;
LUNAI_FN luna_status lunai_load_inspected(void *call, luna_params *params, const void *bytes, size_t size) {
  (void)params;
  return luna_inspect_bytes(((lunai_inspect_call *)call)->ctx, bytes, size, ((lunai_inspect_call *)call)->inspection);
}
LUNAI_FN luna_status lunai_load_matched(void *report, luna_params *params, const void *bytes, size_t size) {
  return luna_load_matching_bytes(params, bytes, size, (luna_load_report *)report);
}

LUNAI_FN luna_status lunai_load_through(luna_ctx *ctx, const char *name, lunai_loader loader, void *into,
                                        luna_params *params, const luna_io *io) {
  const char *outer = lunai_enter(ctx, name);
  const lunai_mark mark = lunai_step_mark(ctx);
  luna_status status = LUNA_OK;
  void *bytes;
  if (io->size > SIZE_MAX / 4 || !lunai_step(ctx, (size_t)io->size, false, &bytes))
    status = lunai_fail_memory(ctx, ctx->call, (size_t)io->size);
  else if (io->size && !io->read(io->user, bytes, (size_t)io->size))
    status = lunai_fail_status(ctx, LUNA_ERROR_READ_FAILED, ctx->call, lunai_file_name(ctx), (int64_t)io->size);
  if (status == LUNA_OK) status = loader(into, params, bytes, (size_t)io->size);
  lunai_step_rewind(ctx, mark);
  lunai_leave(ctx, outer);
  return status;
}
LUNA_API luna_status luna_load_io(luna_params *params, const luna_io *io) {
  if (!params) return LUNA_BAD_ARGUMENT;
  if (!io || !io->read)
    return lunai_fail_status(params->ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_load_io", io ? "io->read" : "io");
  return lunai_load_through(params->ctx, "luna_load_io", lunai_load_values, NULL, params, io);
}

#ifndef LUNA_NO_STDIO
#include <stdio.h>
#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
#define lunai_seek_end(f) _fseeki64(f, 0, SEEK_END)
#define lunai_tell(f) ((int64_t)_ftelli64(f))
#else
#define lunai_seek_end(f) fseek(f, 0, SEEK_END)
#define lunai_tell(f) ((int64_t)ftell(f))
#endif
#if defined(__unix__) || defined(__APPLE__)
#define LUNAI_POSIX_FILES
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__STRICT_ANSI__) && !defined(__cplusplus)
int fileno(FILE *stream);            /* POSIX functions that strict C99 headers do not declare */
FILE *fdopen(int descriptor, const char *mode);
int fsync(int descriptor);
int fchmod(int descriptor, mode_t mode);
ssize_t readlink(const char *path, char *to, size_t room);
#endif
#endif

LUNAI_FN bool lunai_file_write(void *user, const void *bytes, size_t size) {
  return fwrite(bytes, 1, size, (FILE *)user) == size;
}
LUNAI_FN bool lunai_file_read(void *user, void *bytes, size_t size) {
  return fread(bytes, 1, size, (FILE *)user) == size;
}

/* --- saving: into a new file in the folder of the old one, which then takes its place. Its name, .luna-<n>.tmp, is
   luna.h's: one whose process has ended is removed by a later save in that folder. --- */
#define LUNAI_LONGEST_PATH 4096
#define LUNAI_SAVERS 1000             /* at once in one folder */
typedef struct lunai_saving_file {
  char path[LUNAI_LONGEST_PATH], temporary[LUNAI_LONGEST_PATH]; /* what is to be replaced; what is written */
  size_t folder;                      /* the length of path's folder, with its end */
  FILE *file;
#ifdef _WIN32
  HANDLE lock;
#elif defined(LUNAI_POSIX_FILES)
  bool replaces;                      /* an old file, of this mode */
  mode_t mode;
#endif
} lunai_saving_file;

LUNAI_FN size_t lunai_folder_of(const char *path) {
  size_t i = strlen(path);
#ifdef _WIN32
  while (i > 0 && path[i - 1] != '/' && path[i - 1] != '\\' && path[i - 1] != ':') i--;
#else
  while (i > 0 && path[i - 1] != '/') i--;
#endif
  return i;
}
LUNAI_FN void lunai_saving_name(lunai_saving_file *s, const char *format, int64_t number) {
  memcpy(s->temporary, s->path, s->folder);
  lunai_print(s->temporary + s->folder, sizeof s->temporary - s->folder, format, number);
}

#ifdef _WIN32
/* A number is held by a lock file of its own, which no other process can open and which goes with its process; an old
   temporary file of a number so held is abandoned. */
LUNAI_FN luna_error_id lunai_saving_open(lunai_saving_file *s) {
  struct _stat old;
  int64_t number;
  int descriptor;
  if (_stat(s->path, &old) == 0 && (old.st_mode & _S_IFMT) != _S_IFREG) return LUNA_ERROR_SAVE_IRREGULAR;
  for (number = 0; number < LUNAI_SAVERS; number++) {
    lunai_saving_name(s, ".luna-%d.lock", number);
    s->lock = CreateFileA(s->temporary, GENERIC_WRITE | DELETE, 0, NULL, CREATE_NEW, FILE_FLAG_DELETE_ON_CLOSE, NULL);
    if (s->lock == INVALID_HANDLE_VALUE) {
      if (GetLastError() == ERROR_PATH_NOT_FOUND) break;
      continue;
    }
    lunai_saving_name(s, ".luna-%d.tmp", number);
    DeleteFileA(s->temporary);
    descriptor = _open(s->temporary, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
    s->file = descriptor < 0 ? NULL : _fdopen(descriptor, "wb");
    if (s->file) return LUNA_ERROR_NONE;
    CloseHandle(s->lock);
  }
  return LUNA_ERROR_SAVE_TEMPORARY;
}
LUNAI_FN bool lunai_saving_flush(lunai_saving_file *s) {
  const bool flushed = fflush(s->file) == 0 && _commit(_fileno(s->file)) == 0, closed = fclose(s->file) == 0;
  s->file = NULL;
  return flushed && closed;
}
/* retries for a second: another process may have the file open */
LUNAI_FN bool lunai_saving_replace(const lunai_saving_file *s) {
  int i;
  for (i = 0; i < 200; i++, Sleep(5)) {
    if (MoveFileExA(s->temporary, s->path, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return true;
    if (GetLastError() != ERROR_ACCESS_DENIED && GetLastError() != ERROR_SHARING_VIOLATION) break;
  }
  return false;
}
LUNAI_FN void lunai_saving_close(lunai_saving_file *s, bool replaced) {
  if (s->file) fclose(s->file);
  if (!replaced) DeleteFileA(s->temporary);
  CloseHandle(s->lock);
}
#elif defined(LUNAI_POSIX_FILES)
/* A temporary file is locked (flock, released when its process ends) as long as it has its name; only the lock's
   holder may rename or remove it. Between creation and locking another process may take it for abandoned and remove
   it: its creator then takes another number. (A 32-bit program that cannot read a file's number removes none.) */
LUNAI_FN bool lunai_saving_locks(int descriptor, const char *name) {
  struct stat opened, named;
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  if (fstat(descriptor, &opened) != 0) return true;
  return stat(name, &named) == 0 && opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}
LUNAI_FN void lunai_saving_sweep(const char *name) {
  struct stat old;
  char link[1];
  int descriptor;
  if (stat(name, &old) != 0 || !S_ISREG(old.st_mode) || old.st_uid != geteuid() || old.st_nlink != 1) return;
  if (readlink(name, link, 1) >= 0) return;
  descriptor = open(name, O_RDONLY | O_NONBLOCK);
  if (descriptor < 0) return;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && lunai_saving_locks(descriptor, name)) unlink(name);
  close(descriptor);
}
/* replaces a path that is a symbolic link by its target, which need not exist */
LUNAI_FN luna_error_id lunai_saving_resolve(lunai_saving_file *s) {
  int links;
  for (links = 0; links < 40; links++) {
    const ssize_t size = readlink(s->path, s->temporary, sizeof s->temporary);
    s->folder = size > 0 && s->temporary[0] == '/' ? 0 : lunai_folder_of(s->path);
    if (size < 0) return s->folder + 32 < LUNAI_LONGEST_PATH ? LUNA_ERROR_NONE : LUNA_ERROR_SAVE_PATH;
    if (s->folder + (size_t)size >= LUNAI_LONGEST_PATH) return LUNA_ERROR_SAVE_PATH;
    memcpy(s->path + s->folder, s->temporary, (size_t)size);
    s->path[s->folder + (size_t)size] = 0;
  }
  return LUNA_ERROR_SAVE_LINK;
}
LUNAI_FN luna_error_id lunai_saving_open(lunai_saving_file *s) {
  const luna_error_id wrong = lunai_saving_resolve(s);
  struct stat old;
  int64_t number;
  if (wrong) return wrong;
  s->replaces = stat(s->path, &old) == 0;
  if (s->replaces && !S_ISREG(old.st_mode)) return LUNA_ERROR_SAVE_IRREGULAR;
  s->mode = s->replaces ? old.st_mode & 0777 : 0600;
  if (!s->replaces && errno == EOVERFLOW) s->replaces = true; /* likewise: it is there, and its mode is not known */
  else if (!s->replaces && errno != ENOENT) return LUNA_ERROR_SAVE_LOOKUP;
  for (number = 0; number < 16; number++) {
    lunai_saving_name(s, ".luna-%d.tmp", number);
    lunai_saving_sweep(s->temporary);
  }
  for (number = 0; number < LUNAI_SAVERS; number++) {
    int descriptor;
    lunai_saving_name(s, ".luna-%d.tmp", number);
    descriptor = open(s->temporary, O_WRONLY | O_CREAT | O_EXCL, s->replaces ? 0600 : 0666); /* follows no link */
    if (descriptor < 0 && errno != EEXIST) break;
    if (descriptor < 0) continue;
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    if (lunai_saving_locks(descriptor, s->temporary) && (s->file = fdopen(descriptor, "wb")) != NULL)
      return LUNA_ERROR_NONE;
    close(descriptor);
  }
  return LUNA_ERROR_SAVE_TEMPORARY;
}
LUNAI_FN bool lunai_saving_flush(lunai_saving_file *s) {
  if (s->replaces) (void)!fchmod(fileno(s->file), s->mode); /* fails where a file system has no modes */
  return fflush(s->file) == 0 && fsync(fileno(s->file)) == 0;
}
LUNAI_FN bool lunai_saving_replace(lunai_saving_file *s) {
  int folder;
  if (rename(s->temporary, s->path) != 0) return false;
  s->path[s->folder] = 0;
  folder = open(s->folder ? s->path : ".", O_RDONLY);
  if (folder < 0) return true;
  fsync(folder);                     /* best effort: the file is already renamed */
  close(folder);
  return true;
}
LUNAI_FN void lunai_saving_close(lunai_saving_file *s, bool replaced) {
  if (!replaced) unlink(s->temporary);
  fclose(s->file);                   /* which releases the lock, after the rename */
}
#else
/* standard C only: one saver at a time in a folder */
LUNAI_FN luna_error_id lunai_saving_open(lunai_saving_file *s) {
  lunai_saving_name(s, ".luna-%d.tmp", 0);
  s->file = fopen(s->temporary, "wb");
  return s->file ? LUNA_ERROR_NONE : LUNA_ERROR_SAVE_TEMPORARY;
}
LUNAI_FN bool lunai_saving_flush(lunai_saving_file *s) {
  const bool closed = fclose(s->file) == 0;
  s->file = NULL;
  return closed;
}
LUNAI_FN bool lunai_saving_replace(const lunai_saving_file *s) { return rename(s->temporary, s->path) == 0; }
LUNAI_FN void lunai_saving_close(lunai_saving_file *s, bool replaced) {
  if (s->file) fclose(s->file);
  if (!replaced) remove(s->temporary);
}
#endif

typedef luna_status (*lunai_saver)(const void *what, const luna_io *io);
LUNAI_FN luna_status lunai_save_file(luna_ctx *ctx, lunai_saver saver, const void *what, const char *path) {
  lunai_saving_file s;
  luna_io io;
  luna_status status;
  luna_error_id wrong;
  memset(&io, 0, sizeof io);
  io.write = lunai_file_write;
  if (ctx->options.measure) return saver(what, &io); /* counts, and writes nothing */
  if (strlen(path) + 32 > sizeof s.path)
    return lunai_fail_status(ctx, LUNA_ERROR_SAVE_PATH, ctx->call, (int64_t)sizeof s.path - 32, path);
  memset(&s, 0, sizeof s);
  memcpy(s.path, path, strlen(path));
  s.folder = lunai_folder_of(path);
  wrong = lunai_saving_open(&s);
  if (wrong == LUNA_ERROR_SAVE_PATH)
    return lunai_fail_status(ctx, (int)wrong, ctx->call, (int64_t)sizeof s.path - 32, path);
  if (wrong) return lunai_fail_status(ctx, (int)wrong, ctx->call, path);
  io.user = s.file;
  status = saver(what, &io);
  if (status == LUNA_OK && !lunai_saving_flush(&s))
    status = lunai_fail_status(ctx, LUNA_ERROR_WRITE_FAILED, ctx->call, path);
  if (status == LUNA_OK && !lunai_saving_replace(&s))
    status = lunai_fail_status(ctx, LUNA_ERROR_SAVE_REPLACE, ctx->call, path);
  lunai_saving_close(&s, status == LUNA_OK);
  return status;
}
LUNAI_FN luna_status lunai_save_path(luna_ctx *ctx, const char *name, lunai_saver saver, const void *what,
                                     const char *path) {
  luna_status status;
  if (!path) return lunai_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, name, "path");
  ctx->call = name;
  ctx->path = path;
  status = lunai_save_file(ctx, saver, what, path);
  ctx->call = ctx->path = NULL;
  return status;
}
LUNAI_FN luna_status lunai_save_params(const void *params, const luna_io *io) {
  return luna_save_io((const luna_params *)params, io);
}
LUNA_API luna_status luna_save(const luna_params *params, const char *path) {
  return params ? lunai_save_path(params->ctx, "luna_save", lunai_save_params, params, path) : LUNA_BAD_ARGUMENT;
}
#ifndef LUNA_NO_TRAIN
LUNAI_FN luna_status lunai_save_optimizer(const void *optimizer, const luna_io *io) {
  return luna_save_training_io((const luna_optimizer *)optimizer, io);
}
LUNA_API luna_status luna_save_training(const luna_optimizer *o, const char *path) {
  return o ? lunai_save_path(o->params->ctx, "luna_save_training", lunai_save_optimizer, o, path) : LUNA_BAD_ARGUMENT;
}
#endif

LUNAI_FN luna_status lunai_load_path(luna_ctx *ctx, const char *name, lunai_loader loader, void *into,
                                     luna_params *params, const char *path) {
  luna_io io;
  luna_status status;
  int64_t size;
  FILE *file;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (!into || !path)
    return lunai_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, name, path ? "what is to be loaded" : "path");
  file = fopen(path, "rb");
  if (!file) return lunai_fail_status(ctx, LUNA_ERROR_CANNOT_OPEN, name, path);
  size = lunai_seek_end(file) == 0 ? lunai_tell(file) : -1;
  if (size >= 0 && (fgetc(file) != EOF || ferror(file))) size = -1; /* a folder has LONG_MAX bytes */
  memset(&io, 0, sizeof io);
  io.read = lunai_file_read;
  io.user = file;
  io.size = (uint64_t)size;
  rewind(file);
  ctx->path = path;
  if (size < 0 || size > INT64_MAX / 4) status = lunai_fail_status(ctx, LUNA_ERROR_READ_IRREGULAR, name, path);
  else status = lunai_load_through(ctx, name, loader, into, params, &io);
  ctx->path = NULL;
  fclose(file);
  return status;
}
LUNA_API luna_status luna_load(luna_params *params, const char *path) {
  return lunai_load_path(lunai_ctx_of(params), "luna_load", lunai_load_values, params, params, path);
}
LUNA_API luna_status luna_lm_load(luna_lm *model, luna_params *params, const char *path) {
  lunai_setup s;
  bool good = lunai_setup_begin(&s, "luna_lm_load", params, NULL, model, sizeof *model);
  good = good && lunai_load_path(params->ctx, "luna_lm_load", lunai_load_lm, model, params, path) == LUNA_OK;
  return lunai_setup_end(&s, good);
}
LUNA_API luna_status luna_load_model(luna_model *model, luna_params *params, const char *path) {
  lunai_setup s;
  bool good = lunai_setup_begin(&s, "luna_load_model", params, NULL, model, sizeof *model);
  good = good && lunai_load_path(params->ctx, "luna_load_model", lunai_load_any, model, params, path) == LUNA_OK;
  return lunai_setup_end(&s, good);
}
LUNA_API luna_status luna_load_matching(luna_params *params, const char *path, luna_load_report *report) {
  luna_load_report none;
  memset(&none, 0, sizeof none);
  return lunai_load_path(lunai_ctx_of(params), "luna_load_matching", lunai_load_matched, report ? report : &none,
                         params,
                         path);
}
LUNA_API luna_status luna_inspect(luna_ctx *ctx, const char *path, const luna_inspection *inspection) {
  lunai_inspect_call call;
  call.ctx = ctx;
  call.inspection = inspection;
  return lunai_load_path(ctx, "luna_inspect", lunai_load_inspected, &call, NULL, path);
}
#ifndef LUNA_NO_TRAIN
LUNA_API luna_status luna_load_training(luna_optimizer *o, const char *path) {
  luna_params *params = o ? o->params : NULL;
  return lunai_load_path(lunai_ctx_of(params), "luna_load_training", lunai_load_trained, o, params, path);
}
#endif
#endif /* !LUNA_NO_STDIO */
#endif /* !LUNA_ONLY_STREAM */

/* ---------------------------------------------------------------------------------------------------------------------
   >>stream: the layers in step form: a few rows of each sequence, and of the tokens before them what lunai_past has.
   A stream is a context of its own in one block of memory: its layers, as tensors on the model's parameters, its state,
   and a bump arena that holds a step; what that takes is found at opening by running a step that computes nothing. What
   the parameters and a decoder's sources alone make is computed once. For a model on a device all values are there, in
   a block of their own. Guarded by tests/stream.c, a decoder by tests/models.c, on a device by tests/device.c and
   tests/cuda.c.
   ------------------------------------------------------------------------------------------------------------------ */
enum { LUNAI_SLOT_ALWAYS, LUNAI_SLOT_FULL, LUNAI_SLOT_TIED, LUNAI_SLOT_GATED, LUNAI_SLOT_CONVOLUTION,
    LUNAI_SLOT_MATRIX };
/* The parameters of a stream's layers: name.weight [rows, columns], and name.bias [rows] beside it; a norm's are both
   [rows]; a MATRIX is alone, by its name. rows and columns are offsets in lunai_lm_sizes. */
typedef struct lunai_slot { const char *name; uint16_t at, rows, columns; uint8_t when; } lunai_slot;
#define LUNAI_NO_COLUMNS 0xFFFF
#define LUNAI_SLOT(type, field, name, rows, columns, when) \
  { name, (uint16_t)offsetof(type, field), (uint16_t)offsetof(lunai_lm_sizes, rows), columns, when },
#define LUNAI_SIZE(size) (uint16_t)offsetof(lunai_lm_sizes, size)
static const lunai_slot lunai_causal_slots[] = {
#define LUNAI_FIELD(field, name, rows, columns, when) LUNAI_SLOT(luna_causal_layer, field, name, rows, columns, when)
  LUNAI_FIELD(attention.pq, "self_attn.pq_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(attention.pc, "self_attn.pc_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(attention.q, "self_attn.q_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(attention.k, "self_attn.k_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_FULL)
  LUNAI_FIELD(attention.v, "self_attn.v_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_FULL)
  LUNAI_FIELD(attention.v, "self_attn.c_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_TIED)
  LUNAI_FIELD(attention.out, "self_attn.out_proj", dim, LUNAI_SIZE(dim), LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(fc1, "fc1", ffn, LUNAI_SIZE(dim), LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(fc2, "fc2", dim, LUNAI_SIZE(ffn), LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(fc3, "fc3", ffn, LUNAI_SIZE(dim), LUNAI_SLOT_GATED)
  LUNAI_FIELD(kernel, "conv", dim, LUNAI_SIZE(convolution), LUNAI_SLOT_CONVOLUTION)
  LUNAI_FIELD(attention_norm, "self_attn_layer_norm", dim, LUNAI_NO_COLUMNS, LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(final_norm, "final_layer_norm", dim, LUNAI_NO_COLUMNS, LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(memory, "projected_embeddings", memory, LUNAI_SIZE(dim), LUNAI_SLOT_MATRIX)
#undef LUNAI_FIELD
};
#ifndef LUNA_ONLY_STREAM
static const lunai_slot lunai_decoder_slots[] = { /* read from a model alone */
#define LUNAI_FIELD(field, when) LUNAI_SLOT(luna_decoder_layer, field, "", dim, LUNAI_NO_COLUMNS, when)
  LUNAI_FIELD(self_attention.pq, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(self_attention.pc, LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(self_attention.q, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(self_attention.k, LUNAI_SLOT_FULL)
  LUNAI_FIELD(self_attention.v, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(self_attention.out, LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(self_norm, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(cross_attention.q, LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(cross_attention.out, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(cross_norm, LUNAI_SLOT_ALWAYS)
  LUNAI_FIELD(fc1, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(fc2, LUNAI_SLOT_ALWAYS) LUNAI_FIELD(fc3, LUNAI_SLOT_GATED)
  LUNAI_FIELD(final_norm, LUNAI_SLOT_ALWAYS)
#undef LUNAI_FIELD
};
#endif
#undef LUNAI_SLOT
#undef LUNAI_SIZE

/* a layer, its own tensors of the parameters, and its past */
typedef struct lunai_stream_layer {
  union { luna_causal_layer causal; luna_decoder_layer decoder; } of;
  lunai_past past;
  luna_tensor parameters[28];
} lunai_stream_layer;

struct luna_stream {
  lunai_lm_sizes sizes;
  luna_ctx ctx;                      /* the stream's own: its status and sentence are the stream's, its step is: */
  lunai_bump bump;
  luna_step_state step_state;        /* of a stream on the host */
  lunai_stream_layer *layers;
  luna_tensor embedding, output, positions; /* [vocab, dim], [outputs, dim]; a learned table */
  luna_tensor output_bias;           /* of rank 0: none */
  luna_tensor mean, feature_scale, projection, projection_bias; /* of features, in the embedding's place */
  float *standard;                   /* mean and scale on the host, [2, features] */
  luna_tensor norm_weight, norm_bias;
  luna_norm_layer norm;              /* these, where there are any */
  int64_t batch, chunk, position, first_position;
  int64_t sources;                   /* as in lunai_past */
  float scale;                       /* of the embedding */
  bool cross;                        /* a decoder */
  char *state;                       /* all layers' means, then all histories */
  size_t state_size;
  char *inputs, *host_inputs;        /* of a step: lunai_inputs; on the host the same */
  float *logits;                     /* [batch, outputs], on the host */
  int32_t *slots, *source_slots;     /* as in lunai_past, or null */
  luna_error_id error;               /* of the last call */
  const luna_ctx *model_ctx;         /* of a stream opened from a model: its context, never dereferenced, */
  luna_allocator allocator;          /* and where its memory is from */
  size_t memory_size;
  char *device_memory;               /* in the device's memory */
  size_t device_size;
};

LUNAI_FN bool lunai_stream_folds(const lunai_lm_sizes *s) { return s->heads * s->memory <= s->dim + s->memory; }
LUNAI_FN int64_t lunai_stream_fold_size(const lunai_lm_sizes *s) {
  return (lunai_stream_folds(s) ? s->heads : 1) * s->memory * s->dim;
}
LUNAI_FN bool lunai_stream_on_device(const luna_stream *s) { return lunai_on_device(&s->ctx); }

/* copies bytes of the stream, or only counts; false: the device has failed, now or before */
LUNAI_FN bool lunai_stream_move(luna_stream *s, void *to, const void *from, size_t bytes, int direction) {
  luna_ctx *ctx = &s->ctx;
  if (ctx->status == LUNA_OK && lunai_computes(ctx))
    (void)lunai_backend_result(ctx, "luna_stream", ctx->backend->copy(ctx, to, from, bytes, direction));
  return ctx->status == LUNA_OK;
}

LUNAI_FN luna_tensor lunai_stream_tensor(luna_stream *s, float *data, int rank, int64_t a, int64_t b, int64_t c,
                                         int64_t d) {
  int64_t shape[4];
  luna_tensor t;
  shape[0] = a; shape[1] = b; shape[2] = c; shape[3] = d;
  lunai_tensor_set(&t, &s->ctx, rank, shape);
  t.data = data;
  return t;
}

/* What changes from step to step, in one place, which a device is sent before the step. */
typedef struct lunai_inputs {
  int64_t *position;                 /* rows before these */
  int32_t *tokens, *places;          /* [batch, rows]; of a learned table [rows] */
  float *angles;                     /* sinusoidal positions [rows, dim] */
  float *features;                   /* standardised, [batch, rows, features] */
  size_t size;
} lunai_inputs;
LUNAI_FN lunai_inputs lunai_stream_inputs(const luna_stream *s, char *at, int64_t rows) {
  const int64_t angles = s->sizes.positions == LUNA_POSITIONS_SINUSOIDAL ? rows * s->sizes.dim : 0;
  lunai_inputs in;
  in.position = (int64_t *)(void *)at;
  in.tokens = (int32_t *)(void *)(in.position + 1);
  in.places = in.tokens + s->batch * rows;
  in.angles = (float *)(void *)(in.places + rows);
  in.features = in.angles + angles;
  in.size = sizeof(int64_t) + (size_t)((s->batch + 1 + s->batch * s->sizes.features) * rows + angles) * sizeof(float);
  return in;
}
/* the inputs of the next `rows` from row `at` on of each sequence of n */
LUNAI_FN bool lunai_stream_send(luna_stream *s, const luna_input *from, int64_t at, int64_t rows) {
  const lunai_inputs in = lunai_stream_inputs(s, s->host_inputs, rows);
  const int64_t first = s->first_position + s->position, k = s->sizes.features;
  int64_t i, f;
  *in.position = s->position;
  for (i = 0; i < s->batch * rows; i++) {
    const int64_t row = i / rows * from->n + at + i % rows;
    if (k == 0) in.tokens[i] = from->tokens[row];
    for (f = 0; f < k; f++) {        /* as luna_input_layer_forward */
      const float x = from->features[row * k + f];
      in.features[i * k + f] = x == x ? (x - s->standard[f]) * s->standard[k + f] : 0;
    }
  }
  for (i = 0; i < rows; i++) in.places[i] = (int32_t)(first + i);
  for (i = 0; i < rows && s->sizes.positions == LUNA_POSITIONS_SINUSOIDAL; i++)
    lunai_sinusoid(first + i, s->sizes.dim, in.angles + i * s->sizes.dim);
  return s->inputs == s->host_inputs || lunai_stream_move(s, s->inputs, s->host_inputs, in.size, 1);
}

/* --- a step: the layers' forward --- */
/* x = y, and what was made since the mark is gone */
LUNAI_FN luna_tensor *lunai_stream_keep(luna_stream *s, luna_tensor *x, const luna_tensor *y, lunai_mark mark) {
  if (!x || !y) return NULL;
  if (x != y && !lunai_stream_move(s, x->data, y->data, (size_t)luna_count(x) * sizeof(float), 0)) return NULL;
  lunai_step_rewind(&s->ctx, mark);
  return x;
}
/* `rows` rows of each sequence; `last`: logits after the last of them, [batch, 1, vocab] */
LUNAI_FN luna_tensor *lunai_stream_forward(luna_stream *s, int64_t rows, bool last) {
  const lunai_inputs in = lunai_stream_inputs(s, s->inputs, rows);
  const luna_positions positions = (luna_positions)s->sizes.positions;
  luna_tensor angles, features, *x, *y;
  int64_t shape[2], i;
  lunai_mark mark;
  s->bump.used[0] = s->bump.used[1] = 0;
  s->bump.single = rows == 1;
  if (s->sizes.features) {
    features = lunai_stream_tensor(s, in.features, 3, s->batch, rows, s->sizes.features, 1);
    x = y = luna_linear(&features, &s->projection, &s->projection_bias);
  } else x = y = luna_embedding(&s->embedding, in.tokens, s->batch, rows);
  mark = lunai_step_mark(&s->ctx);
  if (s->scale != 1) y = luna_scale(y, s->scale);
  shape[0] = rows;
  shape[1] = s->sizes.dim;
  lunai_tensor_set(&angles, &s->ctx, 2, shape);
  angles.data = in.angles;
  if (positions == LUNA_POSITIONS_SINUSOIDAL) y = luna_add(y, &angles);
  if (positions == LUNA_POSITIONS_LEARNED)
    y = luna_add(y, luna_reshape(luna_embedding(&s->positions, in.places, 1, rows), 2, shape));
  x = lunai_stream_keep(s, x, y, mark);
  for (i = 0; i < s->sizes.layers && x; i++) {
    lunai_stream_layer *layer = &s->layers[i];
#ifndef LUNA_ONLY_STREAM
    if (s->cross) y = lunai_decoder_layer(&layer->of.decoder, x, NULL, NULL, NULL, NULL, &layer->past);
    else
#endif
      y = lunai_causal_layer(&layer->of.causal, x, &layer->past);
    x = lunai_stream_keep(s, x, y, mark);
  }
  if (!last) return x;
  s->bump.single = true;
  if (rows > 1) x = luna_slice(x, 1, rows - 1, 1);
  if (s->norm.weight && x) x = luna_norm_layer_forward(&s->norm, x);
  return luna_linear(x, &s->output, s->output_bias.rank ? &s->output_bias : NULL);
}

/* row b of a state's [batch, width] floats becomes row from[b], which is in the inputs */
LUNAI_FN void lunai_stream_reorder_rows(luna_stream *s, void *state, int64_t width) {
  luna_tensor table, *y;
  int64_t shape[2];
  shape[0] = s->batch;
  shape[1] = width;
  lunai_tensor_set(&table, &s->ctx, 2, shape);
  table.data = (float *)state;
  s->bump.used[0] = s->bump.used[1] = 0;
  y = luna_embedding(&table, lunai_stream_inputs(s, s->inputs, 1).tokens, s->batch, 1);
  if (y) lunai_stream_move(s, state, y->data, (size_t)(s->batch * width) * sizeof(float), 0);
}
LUNAI_FN void lunai_stream_reorder_all(luna_stream *s) {
  const int64_t means = s->sizes.dim * s->sizes.memory * (int64_t)(sizeof(double) / sizeof(float));
  int64_t i;
  for (i = 0; i < s->sizes.layers && s->batch > 1; i++) {
    lunai_stream_reorder_rows(s, s->layers[i].past.mean_ka, means);
    lunai_stream_reorder_rows(s, s->layers[i].past.mean_av, means);
    if (s->sizes.convolution > 1)
      lunai_stream_reorder_rows(s, s->layers[i].past.history, (s->sizes.convolution - 1) * s->sizes.dim);
  }
}

/* the bias of one source's folded scores, for each of its sequences; queries [heads slots, head_dim] */
LUNAI_FN void lunai_stream_fold_bias(const lunai_lm_sizes *z, const float *queries, const float *key_bias,
                                     int64_t count, float *out) {
  const int64_t l = z->memory, hl = z->heads * l, d = z->dim / z->heads;
  int64_t i, j;
  for (i = 0; i < count * hl; i++) {
    const float *q = queries + i % hl * d, *b = key_bias + i % hl / l * d;
    out[i] = 0;
    for (j = 0; j < d; j++) out[i] += q[j] * b[j];
  }
}
/* what the scores need of a layer's memory [sources, slots, dim], once: on a device of all sources at a time */
LUNAI_FN bool lunai_stream_fold(luna_stream *s, lunai_stream_layer *layer, const float *memory) {
  const lunai_lm_sizes *z = &s->sizes;
  const luna_causal_attention_layer *attention = LUNAI_CROSS(s) ? &layer->of.decoder.self_attention :
      &layer->of.causal.attention;
  const bool device = lunai_stream_on_device(s), folds = lunai_stream_folds(z);
  const int64_t each = device ? LUNAI_SOURCES(s) : 1, beam = LUNAI_SOURCES(s) > 1 ? s->batch / LUNAI_SOURCES(s) : 1,
      hl = z->heads * z->memory;
  luna_tensor p, *queries, *scores, *bias = NULL;
  int64_t b;
  s->bump.single = false;
  for (b = 0; b < LUNAI_SOURCES(s); b += each) {
    float *out_bias = layer->past.scores_bias.data ? layer->past.scores_bias.data + b * beam * hl : NULL;
    s->bump.used[0] = s->bump.used[1] = 0;
    p = lunai_stream_tensor(s, lunai_offset((float *)(uintptr_t)memory, b * z->memory * z->dim), 3, each, z->memory,
                            z->dim, 1);
    queries = scores = lunai_causal_queries(attention, &p);
    if (folds) scores = lunai_causal_folded(attention, queries, device ? &bias : NULL);
    if (folds && device) bias = lunai_permute(luna_expand(lunai_reshape(bias, 3, each, hl, 1, 1), beam), 1, 0, 2, 3);
    if (!scores || (folds && device && !bias)) return false;
    if (folds && !device && lunai_computes(&s->ctx))
      lunai_stream_fold_bias(z, queries->data, attention->pc.bias->data, beam, out_bias);
    if (bias && !lunai_stream_move(s, out_bias, bias->data, (size_t)luna_count(bias) * sizeof(float), 0)) return false;
    if (!lunai_stream_move(s, lunai_offset(layer->past.scores.data, b * lunai_stream_fold_size(z)), scores->data,
                           (size_t)luna_count(scores) * sizeof(float), 0)) return false;
  }
  return true;
}

/* --- opening --- */
/* whether the stream can go on: not after its device has failed */
LUNAI_FN bool lunai_stream_ready(luna_stream *s) {
  s->error = s->ctx.status == LUNA_OK ? LUNA_ERROR_NONE : LUNA_ERROR_BACKEND;
  return s->ctx.status == LUNA_OK;
}

LUNA_API void luna_stream_reset(luna_stream *s) {
  if (!s || !lunai_stream_ready(s)) return;
  s->position = 0;
  (void)lunai_backend_result(&s->ctx, "luna_stream_reset", s->ctx.backend->zero(&s->ctx, s->state, s->state_size));
}

LUNAI_FN const char *lunai_stream_config(luna_stream *s, const luna_stream_config *config) {
  const lunai_lm_sizes *z = &s->sizes;
  int64_t rows;
  s->batch = config && config->batch ? config->batch : 1;
  s->chunk = config && config->chunk ? config->chunk : 64;
  s->ctx.kernels = lunai_kernels_of(config ? config->isa : LUNA_ISA_BEST);
  s->ctx.parallel.threads = 1;
  s->sources = 1;
  s->scale = 1;
  if (!s->ctx.kernels) return "config.isa is not available on this machine";
  if (z->attention) return "only Luna attention streams in constant memory";
  rows = lunai_checked(s->batch, s->chunk);
  if (s->batch < 1 || s->chunk < 1 || rows < 0) return "config.batch or config.chunk is negative or too large";
  if (lunai_checked(rows, z->dim) < 0 || lunai_checked(lunai_checked(s->batch, z->dim), lunai_max(1, z->convolution)) <
      0)
    return "a stream of these sizes is too large";
  if (lunai_checked(rows, z->ffn) < 0 || lunai_checked(lunai_checked(s->batch, z->dim), 2 * z->memory) < 0 ||
      lunai_checked(lunai_checked(rows, z->heads), z->memory) < 0 ||
      lunai_checked(lunai_checked(z->heads, z->memory), z->dim) < 0 ||
          lunai_checked(s->batch, lunai_lm_outputs(z)) < 0 ||
      lunai_checked(rows, z->features + 1) < 0) return "a stream of these sizes is too large";
  return NULL;
}

/* A parameter of the stream: that of a model, or the file's by that name; neither: its shape alone. False: it is not as
   it should be. */
LUNAI_FN bool lunai_stream_parameter(luna_stream *s, luna_tensor *t, const luna_tensor *from, const lunai_st *st,
                                     const char *prefix, const char *name, const char *suffix,
                                     int rank, int64_t rows, int64_t columns) {
  char full[96];                     /* all three are ours: at most 26, 40 and 7 characters */
  lunai_st_tensor found;
  size_t at = strlen(prefix), size = strlen(name);
  *t = lunai_stream_tensor(s, NULL, rank, rows, columns, 1, 1);
  if (from) {
    *t = *from;
    t->ctx = &s->ctx;
  }
  if (from || !st) return true;
  memcpy(full, prefix, at);
  memcpy(full + at, name, size);
  memcpy(full + at + size, suffix, strlen(suffix) + 1);
  if (!lunai_st_find(st, full, &found) || found.rank != rank || found.shape[0] != rows ||
      (rank == 2 && found.shape[1] != columns)) return false;
  t->data = (float *)(uintptr_t)lunai_st_borrow(&found);
  return t->data != NULL;
}
LUNAI_FN void lunai_stream_prefix(int64_t layer, char out[32]) {
  char digits[24];
  int i = 23, at = 7;
  memcpy(out, "layers.", 7);
  digits[23] = 0;
  do digits[--i] = (char)('0' + layer % 10); while ((layer /= 10) != 0);
  while (digits[i]) out[at++] = digits[i++];
  out[at++] = '.';
  out[at] = 0;
}
/* a layer as that of a model is, or as the file and the sizes say */
LUNAI_FN bool lunai_stream_layer_open(luna_stream *s, int64_t index, const void *from, const lunai_st *st) {
  lunai_lm_sizes *z = &s->sizes;
  lunai_stream_layer *layer = &s->layers[index];
  const int64_t n = LUNAI_SOURCES(s), hl = z->heads * z->memory, d = z->dim;
  const lunai_slot *slots = lunai_causal_slots;
  int count = LUNAI_LENGTH(lunai_causal_slots), i, part, used = 0;
  luna_lm_config config;
  char prefix[32];
  lunai_stream_prefix(index, prefix);
  lunai_lm_from_sizes(z, &config);
  layer->of.causal.config = config.layer;
  layer->of.causal.attention.config = lunai_causal_config(&config.layer);
#ifndef LUNA_ONLY_STREAM
  if (s->cross) {
    layer->of.decoder = *(const luna_decoder_layer *)from;
    slots = lunai_decoder_slots;
    count = LUNAI_LENGTH(lunai_decoder_slots);
  }
#endif
  for (i = 0; i < count; i++) {
    const lunai_slot *slot = &slots[i];
    const int64_t rows = *(int64_t *)(void *)((char *)z + slot->rows);
    const bool norm = slot->columns == LUNAI_NO_COLUMNS, matrix = slot->when == LUNAI_SLOT_MATRIX;
    if ((slot->when == LUNAI_SLOT_FULL && !z->sharing) || (slot->when == LUNAI_SLOT_TIED && z->sharing) ||
        (slot->when == LUNAI_SLOT_GATED && !z->gated) ||
        (slot->when == LUNAI_SLOT_CONVOLUTION && !z->convolution)) continue;
    for (part = 0; part < (matrix ? 1 : 2); part++) {
      luna_tensor **at = (luna_tensor **)(void *)((char *)&layer->of + slot->at) + part;
      const luna_tensor *model = from ? ((luna_tensor *const *)(const void *)((const char *)from + slot->at))[part] :
          NULL;
      if (!lunai_stream_parameter(s, &layer->parameters[used], model, st, prefix, slot->name,
                                  matrix ? "" : part ? ".bias" : ".weight",
                                  norm || part ? 1 : 2, rows, norm || part ? 1 :
                                      *(int64_t *)(void *)((char *)z + slot->columns))) return false;
      *at = &layer->parameters[used++];
    }
  }
  if (!lunai_stream_folds(z))
    layer->past.scores = n == 1 ? lunai_stream_tensor(s, layer->past.scores.data, 3, z->heads, z->memory, d / z->heads,
                                                      1) :
                                                   lunai_stream_tensor(s, layer->past.scores.data, 4, n, z->heads,
                                                       z->memory, d / z->heads);
  else layer->past.scores = n == 1 ? lunai_stream_tensor(s, layer->past.scores.data, 2, hl, d, 1, 1) :
      lunai_stream_tensor(s, layer->past.scores.data, 3, n, hl, d, 1);
  layer->past.scores_bias = !lunai_stream_folds(z) ? lunai_stream_tensor(s, NULL, 0, 1, 1, 1, 1) :
                            n == 1 ? lunai_stream_tensor(s, layer->past.scores_bias.data, 1, hl, 1, 1, 1) :
                                lunai_stream_tensor(s, layer->past.scores_bias.data, 3, n, s->batch / n, hl, 1);
  if (LUNAI_CROSS(s)) {
    layer->past.keys = lunai_stream_tensor(s, layer->past.keys.data, 3, n, z->memory, d, 1);
    layer->past.values = lunai_stream_tensor(s, layer->past.values.data, 3, n, z->memory, d, 1);
  }
  layer->past.position = lunai_stream_inputs(s, s->inputs, 1).position;
  layer->past.sources = n;
  layer->past.slots = s->slots;
  layer->past.source_slots = s->source_slots;
  return true;
}
/* the parameters beside the layers'; null, or what is wrong with them */
#define LUNAI_STREAM_UNREADABLE \
  " is missing, of another shape, not F32, not aligned to 4 bytes, or this machine is not little-endian"
LUNAI_FN const char *lunai_stream_parameters(luna_stream *s, const lunai_st *st) {
  const lunai_lm_sizes *z = &s->sizes;
  const int64_t k = z->features;
  bool good = k ? lunai_stream_parameter(s, &s->mean, NULL, st, "", "input_norm", ".mean", 1, k, 1) &&
                  lunai_stream_parameter(s, &s->feature_scale, NULL, st, "", "input_norm", ".scale", 1, k, 1) &&
                  lunai_stream_parameter(s, &s->projection, NULL, st, "", "input_proj", ".weight", 2, z->dim, k) &&
                  lunai_stream_parameter(s, &s->projection_bias, NULL, st, "", "input_proj", ".bias", 1, z->dim, 1) :
                  lunai_stream_parameter(s, &s->embedding, NULL, st, "", "embed_tokens", ".weight", 2, z->vocab,
                                         z->dim);
  if (!good)
    return k ? "input_norm or input_proj" LUNAI_STREAM_UNREADABLE : "embed_tokens.weight" LUNAI_STREAM_UNREADABLE;
  s->output = s->embedding;
  if (z->outputs) {
    const char *name = "output_projection";
    good = lunai_stream_parameter(s, &s->output, NULL, st, "", name, ".weight", 2, z->outputs, z->dim) &&
           lunai_stream_parameter(s, &s->output_bias, NULL, st, "", name, ".bias", 1, z->outputs, 1);
    if (!good) return "output_projection" LUNAI_STREAM_UNREADABLE;
  }
  if (z->positions == LUNA_POSITIONS_LEARNED && !lunai_stream_parameter(s, &s->positions, NULL, st, "",
      "embed_positions", ".weight", 2, z->max_length, z->dim))
    return "embed_positions.weight is missing or of another shape";
  if (z->pre_norm && (!lunai_stream_parameter(s, &s->norm_weight, NULL, st, "", "layer_norm", ".weight", 1, z->dim,
                                              1) ||
                      !lunai_stream_parameter(s, &s->norm_bias, NULL, st, "", "layer_norm", ".bias", 1, z->dim,
                                              1))) return "layer_norm is missing or of another shape";
  s->norm.weight = z->pre_norm ? &s->norm_weight : NULL;
  s->norm.bias = z->pre_norm ? &s->norm_bias : NULL;
  return NULL;
}

/* means and scales to the host; false: the device has failed */
LUNAI_FN bool lunai_stream_standard(luna_stream *s) {
  const int64_t k = s->sizes.features;
  const size_t bytes = (size_t)k * sizeof(float);
  return k == 0 || (lunai_stream_move(s, s->standard, s->mean.data, bytes, 2) &&
                    lunai_stream_move(s, s->standard + k, s->feature_scale.data, bytes, 2));
}

/* What steps of any number of rows and opening take, found by running them on one layer (from: a model's, or null)
   without computing. On the host more rows take more. */
LUNAI_FN bool lunai_stream_measure(luna_stream *s, const void *from) {
  const int64_t layers = s->sizes.layers;
  luna_tensor small[40];
  lunai_stream_layer layer;
  int64_t rows;
  bool good;
  memset(&layer, 0, sizeof layer);
  s->ctx.bump = &s->bump;
  s->layers = &layer;
  s->inputs = (char *)s;             /* placeholders, which nothing dereferences */
  layer.past.mean_ka = layer.past.mean_av = (double *)(void *)s;
  layer.past.history = (float *)(void *)s;
  s->bump.start[0] = (char *)small;
  s->bump.size[0] = sizeof small;
  s->bump.size[1] = SIZE_MAX / 2;
  s->sizes.layers = 1;
  s->ctx.reserving = true;
  good = lunai_stream_layer_open(s, 0, from, NULL) && lunai_stream_parameters(s, NULL) == NULL;
  for (rows = s->chunk; good && rows > 0; rows = lunai_stream_on_device(s) ? rows - 1 : rows > 1)
    good = lunai_stream_forward(s, rows, true) != NULL;
  good = good && lunai_stream_fold(s, &layer, NULL);
  if (good) lunai_stream_reorder_all(s);
  s->ctx.reserving = false;
  s->sizes.layers = layers;
  s->inputs = NULL;
  return good;
}

LUNAI_INLINE void *lunai_stream_take(char *base, size_t *used, int64_t count, size_t size) {
  char *at = base ? base + *used : NULL;
  *used += lunai_round((size_t)count * size);
  return at;
}
/* Lays the stream out from `base` (null: only counts) and returns its bytes; on a device the values from
   s->device_memory (null: only counts), device_size bytes. */
LUNAI_FN size_t lunai_stream_lay_out(luna_stream *s, char *base) {
  const lunai_lm_sizes *z = &s->sizes;
  const bool device = lunai_stream_on_device(s);
  const int64_t means = s->batch * z->dim * z->memory, past =
      z->convolution ? s->batch * (z->convolution - 1) * z->dim : 0;
  const int64_t beams = LUNAI_SOURCES(s) > 1 ? s->batch : 1,
      cross = LUNAI_CROSS(s) ? LUNAI_SOURCES(s) * z->memory * z->dim : 0;
  const int64_t inputs = (int64_t)lunai_stream_inputs(s, (char *)s, s->chunk).size;
  size_t used = lunai_round(sizeof(luna_stream)), state, host_size;
  int64_t i;
  lunai_stream_layer none, *layer = &none;
  s->ctx.bump = &s->bump;
  s->layers = (lunai_stream_layer *)lunai_stream_take(base, &used, z->layers, sizeof(lunai_stream_layer));
  s->bump.start[0] = (char *)lunai_stream_take(base, &used, (int64_t)s->bump.peak[0], 1);
  if (device) {
    s->host_inputs = (char *)lunai_stream_take(base, &used, inputs, 1);
  }
  s->logits = (float *)lunai_stream_take(base, &used, s->batch * lunai_lm_outputs(z), sizeof(float));
  s->standard = (float *)lunai_stream_take(base, &used, 2 * z->features, sizeof(float));
  if (device) base = s->device_memory;
  host_size = used;
  if (device) used = 0;
  s->state = base ? base + used : NULL;
  state = used;
  for (i = 0; i < z->layers; i++) {
    if (base) layer = &s->layers[i];
    layer->past.mean_ka = (double *)lunai_stream_take(base, &used, means, sizeof(double));
    layer->past.mean_av = (double *)lunai_stream_take(base, &used, means, sizeof(double));
    layer->past.history = (float *)lunai_stream_take(base, &used, past, sizeof(float));
  }
  s->state_size = used - state;
  for (i = 0; i < z->layers; i++) {
    if (base) layer = &s->layers[i];
    layer->past.scores.data = (float *)lunai_stream_take(base, &used, LUNAI_SOURCES(s) * lunai_stream_fold_size(z),
                                                         sizeof(float));
    layer->past.scores_bias.data = (float *)lunai_stream_take(base, &used,
        lunai_stream_folds(z) ? beams * z->heads * z->memory : 0, sizeof(float));
    layer->past.keys.data = (float *)lunai_stream_take(base, &used, cross, sizeof(float));
    layer->past.values.data = (float *)lunai_stream_take(base, &used, cross, sizeof(float));
  }
  s->slots = (int32_t *)lunai_stream_take(base, &used, LUNAI_CROSS(s) ? s->batch : 0, sizeof(int32_t));
  s->source_slots = (int32_t *)lunai_stream_take(base, &used, LUNAI_CROSS(s) ? LUNAI_SOURCES(s) : 0, sizeof(int32_t));
  if (!LUNAI_CROSS(s)) s->slots = s->source_slots = NULL;
  s->inputs = (char *)lunai_stream_take(base, &used, inputs, 1);
  if (!device) s->host_inputs = s->inputs;
  for (i = 0; i < 2; i++) s->bump.size[i] = s->bump.peak[i];
  s->bump.start[1] = (char *)lunai_stream_take(base, &used, (int64_t)s->bump.peak[1], 1);
  s->device_size = used;
  return device ? host_size : used;
}

/* --- opening from a checkpoint's bytes --- */
LUNAI_FN const char *lunai_stream_describe(luna_stream *s, lunai_st *st, const void *bytes, size_t size,
                                           const luna_stream_config *config) {
  const char *wrong;
  memset(s, 0, sizeof *s);
  s->ctx.backend = luna_cpu_backend();
  wrong = bytes ? lunai_st_open(st, bytes, size) : "bytes is null";
  if (!wrong) wrong = lunai_lm_read(st, &s->sizes);
  if (!wrong) wrong = lunai_stream_config(s, config);
  return wrong ? wrong : lunai_stream_measure(s, NULL) ? NULL : "a stream of these sizes is too large";
}

/* offset of a stream's values; while it is opened the index of the file's names is there; then all its bytes */
LUNAI_FN size_t lunai_stream_values_at(const luna_stream *s) {
  return lunai_round(sizeof(luna_stream)) + lunai_round((size_t)s->sizes.layers * sizeof(lunai_stream_layer));
}
LUNAI_FN size_t lunai_stream_bytes(luna_stream *s, const lunai_st *st) {
  const size_t index = lunai_stream_values_at(s) + st->tensors * sizeof(uint64_t), all = lunai_stream_lay_out(s, NULL);
  return all > index ? all : lunai_round(index);
}

LUNA_API size_t luna_stream_size(const void *bytes, size_t size, const luna_stream_config *config, const char **error) {
  luna_stream s;
  lunai_st st;
  const char *wrong = lunai_stream_describe(&s, &st, bytes, size, config);
  if (error) *error = wrong ? wrong : "";
  return wrong ? 0 : lunai_stream_bytes(&s, &st) + (LUNAI_ALIGN - 1);
}

LUNA_API luna_stream *luna_stream_open_bytes(const void *bytes, size_t size, const luna_stream_config *config,
                                             void *memory, size_t memory_size, const char **error) {
  luna_stream first, *s = NULL;
  lunai_st st;
  const size_t shift = (LUNAI_ALIGN - (uintptr_t)memory % LUNAI_ALIGN) % LUNAI_ALIGN;
  const char *wrong = lunai_stream_describe(&first, &st, bytes, size, config);
  size_t need = 0;
  int64_t i;
  if (!wrong) need = lunai_stream_bytes(&first, &st);
  if (!wrong && (!memory || memory_size < shift || memory_size - shift < need))
    wrong = "memory_size is less than luna_stream_size";
  if (!wrong) {
    s = (luna_stream *)(void *)((char *)memory + shift);
    memset(s, 0, need);
    *s = first;
    lunai_stream_lay_out(s, (char *)s);
    wrong = lunai_st_index(&st, (uint64_t *)(void *)((char *)s + lunai_stream_values_at(s)), NULL);
  }
  if (!wrong) wrong = lunai_stream_parameters(s, &st);
  for (i = 0; !wrong && i < s->sizes.layers; i++)
    if (!lunai_stream_layer_open(s, i, NULL, &st)) wrong = "a layer's tensor" LUNAI_STREAM_UNREADABLE;
  if (error) *error = wrong ? wrong : "";
  if (wrong) return NULL;
  memset(st.names, 0, st.tensors * sizeof(uint64_t));
  (void)lunai_stream_standard(s);
  for (i = 0; i < s->sizes.layers; i++) (void)lunai_stream_fold(s, &s->layers[i], s->layers[i].of.causal.memory->data);
  return s;
}

#ifndef LUNA_ONLY_STREAM
/* the context a stream is opened in, and its defaults; false with a sentence when there can be none */
LUNAI_FN bool lunai_stream_from(luna_ctx *ctx, luna_stream *first, const luna_stream_config *config, const char *name) {
  luna_stream_config own;
  const char *wrong = NULL;
  memset(&own, 0, sizeof own);
  if (config) own = *config;
  if (own.isa == LUNA_ISA_BEST) own.isa = ctx->options.isa;
  first->model_ctx = ctx;
  first->allocator = ctx->options.allocator;
  lunai_graph_flush(ctx, "a stream was opened");
  first->ctx.backend = luna_backend_of(ctx);
  first->ctx.self = ctx->self;
  first->ctx.options.allocator = ctx->options.allocator;
  first->ctx.state = ctx->state;
  first->ctx.options.log = ctx->options.log;
  first->ctx.options.log_user = ctx->options.log_user;
  if (ctx->options.measure) wrong = "a context that measures has no weights";
  if (!wrong) wrong = lunai_stream_config(first, &own);
  if (wrong) return lunai_fail_status(ctx, LUNA_ERROR_STREAM_CONFIG, name, wrong) == LUNA_OK;
  if (!lunai_stream_on_device(first) || ctx->backend->op[LUNA_OP_CAUSAL_LUNA].forward) return true;
  return lunai_fail_status(ctx, LUNA_ERROR_NO_OP, name, luna_op_name(LUNA_OP_CAUSAL_LUNA)) == LUNA_OK;
}
/* the stream's failure becomes its model's context's */
LUNAI_FN luna_status lunai_stream_report(luna_ctx *ctx, const luna_stream *s, const char *name) {
  if (s->ctx.status != LUNA_OK && ctx->status == LUNA_OK) luna_backend_fail(ctx, s->ctx.status, s->ctx.error);
  return lunai_backend_result(ctx, name, s->ctx.status);
}
/* A stream of one of the model's layers and tables, in memory from the context's allocator, of a model on a device from
   there */
LUNAI_FN luna_stream *lunai_stream_allocate(luna_ctx *ctx, luna_stream *first, const void *layer) {
  luna_stream *s;
  char *raw;
  size_t size;
  bool good;
  if (!lunai_stream_measure(first, layer)) {
    (void)lunai_stream_report(ctx, first, "luna_stream_open");
    return NULL;
  }
  size = lunai_stream_lay_out(first, NULL);
  first->memory_size = size + LUNAI_ALIGN;
  if (ctx->options.block || (raw = (char *)lunai_raw_allocate(&first->allocator, first->memory_size)) == NULL) {
    if (!ctx->options.block) lunai_fail_memory(ctx, "luna_stream_open", first->memory_size);
    else lunai_fail_status(ctx, LUNA_ERROR_STREAM_BLOCK, "luna_stream_open", (int64_t)first->memory_size);
    return NULL;
  }
  s = (luna_stream *)(void *)(raw + (LUNAI_ALIGN - (uintptr_t)raw % LUNAI_ALIGN));
  memset(s, 0, size);
  *s = *first;
  ((char *)s)[-1] = (char)((char *)s - raw); /* 1..64: how to find the allocation again */
  if (lunai_stream_on_device(s)) {
    s->device_memory = (char *)ctx->backend->allocate(ctx->self, s->device_size);
    good = s->device_memory ? true : lunai_fail_memory(ctx, "luna_stream_open", s->device_size) == LUNA_OK;
  } else {
    s->ctx.state = &s->step_state;
    good = true;
  }
  lunai_stream_lay_out(s, (char *)s);
  if (good) luna_stream_reset(s);
  if (good) return s;
  luna_stream_close(s);
  return NULL;
}
/* the stream's own tensors of a model's tables */
LUNAI_FN void lunai_stream_tables(luna_stream *s, const luna_tensor *embedding, const luna_tensor *output,
                                  const luna_tensor *positions, const luna_norm_layer *norm) {
  if (embedding) (void)lunai_stream_parameter(s, &s->embedding, embedding, NULL, "", "", "", 2, 1, 1);
  (void)lunai_stream_parameter(s, &s->output, output, NULL, "", "", "", 2, 1, 1);
  if (positions) (void)lunai_stream_parameter(s, &s->positions, positions, NULL, "", "", "", 2, 1, 1);
  if (!norm->weight) return;
  (void)lunai_stream_parameter(s, &s->norm_weight, norm->weight, NULL, "", "", "", 1, 1, 1);
  (void)lunai_stream_parameter(s, &s->norm_bias, norm->bias, NULL, "", "", "", 1, 1, 1);
  s->norm.weight = &s->norm_weight;
  s->norm.bias = &s->norm_bias;
}
/* ends opening; null when it has failed, which is reported to the context */
LUNAI_FN luna_stream *lunai_stream_opened(luna_ctx *ctx, luna_stream *s, bool good) {
  /* of a single token; without memory for it there is none */
  if (good && lunai_has_graphs(&s->ctx)) (void)lunai_graph_make(&s->ctx);
  if (good) return s;
  (void)lunai_stream_report(ctx, s, "luna_stream_open");
  luna_stream_close(s);
  return NULL;
}

LUNA_API luna_stream *luna_stream_open(const luna_lm *model, const luna_stream_config *config) {
  luna_stream first, *s;
  luna_ctx *ctx = model && model->params ? model->params->ctx : NULL;
  int64_t i;
  bool good;
  if (!ctx) return NULL;
  memset(&first, 0, sizeof first);
  lunai_lm_to_sizes(&model->config, &first.sizes);
  if (!lunai_is_luna(&model->config.layer)) {
    lunai_fail_status(ctx, LUNA_ERROR_STREAM_ATTENTION);
    return NULL;
  }
  if (!lunai_stream_from(ctx, &first, config, "luna_stream_open")) return NULL;
  if (lunai_stream_on_device(&first) && lunai_backend_result(ctx, "luna_stream_open",
                                                             lunai_wait_for_owners(ctx)) != LUNA_OK) return NULL;
  s = lunai_stream_allocate(ctx, &first, &model->layers[0]);
  if (!s) return NULL;
  lunai_stream_tables(s, model->embedding, lunai_lm_output(model), model->positions, &model->norm);
  if (model->output.bias)
    (void)lunai_stream_parameter(s, &s->output_bias, model->output.bias, NULL, "", "", "", 1, 1, 1);
  if (s->sizes.features) {
    const luna_input_layer *in = &model->input;
    (void)lunai_stream_parameter(s, &s->mean, in->mean, NULL, "", "", "", 1, 1, 1);
    (void)lunai_stream_parameter(s, &s->feature_scale, in->scale, NULL, "", "", "", 1, 1, 1);
    (void)lunai_stream_parameter(s, &s->projection, in->projection.weight, NULL, "", "", "", 2, 1, 1);
    (void)lunai_stream_parameter(s, &s->projection_bias, in->projection.bias, NULL, "", "", "", 1, 1, 1);
  }
  for (i = 0, good = lunai_stream_standard(s); i < s->sizes.layers && good; i++)
    good = lunai_stream_layer_open(s, i, &model->layers[i], NULL) &&
        lunai_stream_fold(s, &s->layers[i], model->layers[i].memory->data);
  return lunai_stream_opened(ctx, s, good);
}

/* what a decoder layer has of its sources: scores from P, keys and values from Y_P; *p becomes the next layer's P (the
   target changes none of it) */
LUNAI_FN bool lunai_stream_sources(luna_stream *s, const luna_decoder_layer *layer, lunai_stream_layer *own,
                                   luna_tensor **p, luna_tensor *context, const int32_t *lengths) {
  const luna_nested_attention_layer *cross = &layer->cross_attention;
  const luna_layer_config *c = &layer->config;
  const size_t bytes = (size_t)luna_count(*p) * sizeof(float);
  luna_tensor *packed_context = lunai_nested_pack(cross, lunai_normed(c, *p, &layer->memory_norm), context,
                                                  lengths), *k, *v;
  if (!lunai_stream_fold(s, own, (*p)->data)) return false;
  v = luna_linear_layer_forward(&cross->v, packed_context);
  k = cross->config.sharing == LUNA_SHARING_TIED || !packed_context ? v : lunai_project(&cross->k, packed_context);
  *p = lunai_residual(c, *p, packed_context, &layer->memory_norm);
  return k && v && *p && lunai_stream_move(s, own->past.keys.data, k->data, bytes, 0) &&
      lunai_stream_move(s, own->past.values.data, v->data, bytes, 0);
}
/* how many memory slots each of `count` sequences has, as many for each source */
LUNAI_FN bool lunai_stream_real(luna_stream *s, int32_t *to, int64_t count, const luna_input *source) {
  int32_t *slots = lunai_stream_on_device(s) ? lunai_stream_inputs(s, s->host_inputs, 1).tokens : to;
  int64_t i;
  for (i = 0; i < count; i++)
    slots[i] = (int32_t)lunai_min(source->lengths ? source->lengths[i / (count / s->sources)] : source->n,
                                  s->sizes.memory);
  return slots == to || lunai_stream_move(s, to, slots, (size_t)count * sizeof(int32_t), 1);
}
LUNA_API luna_stream *luna_seq2seq_stream_open(const luna_seq2seq *model, const luna_input *source, int64_t beam) {
  const luna_seq2seq_config *c;
  luna_stream first, *s = NULL;
  luna_stream_config config;
  luna_ctx *ctx = model && model->params ? model->params->ctx : NULL;
  luna_tensor *p = NULL, *context;
  int64_t i;
  bool good;
  if (!ctx) return NULL;
  c = &model->config;
  if (beam == 0) beam = 1;
  luna_begin_inference(ctx);
  if (!lunai_is_given(ctx, "luna_seq2seq_stream_open", "source", source != NULL) ||
      !lunai_in(ctx, "luna_seq2seq_stream_open", "source->batch", source->batch, 1, LUNAI_MAX_COUNT) ||
      !lunai_in(ctx, "luna_seq2seq_stream_open", "beam", beam, 1, LUNAI_MAX_COUNT / source->batch)) return NULL;
  context = luna_encoder_forward(&model->encoder, source, &p);
  if (!context) return NULL;
  memset(&first, 0, sizeof first);
  memset(&config, 0, sizeof config);
  config.batch = source->batch * beam;
  config.chunk = 1;
  first.sizes.vocab = c->target_vocab; first.sizes.layers = c->decoder_layers; first.sizes.memory = p->shape[1];
  first.sizes.dim = c->encoder.dim; first.sizes.heads = c->encoder.heads; first.sizes.ffn = c->encoder.ffn;
  first.sizes.sharing = c->encoder.layer.sharing == LUNA_SHARING_FULL;
  first.sizes.activation = c->encoder.layer.activation; first.sizes.gated = c->encoder.layer.gated;
  first.sizes.omega = c->encoder.layer.omega;
  first.sizes.pre_norm = c->encoder.layer.pre_norm; first.sizes.positions = c->encoder.positions;
  first.sizes.max_length = c->max_target_length;
  if (!lunai_stream_from(ctx, &first, &config, "luna_seq2seq_stream_open")) return NULL;
  first.sources = source->batch;
  first.cross = true;
  first.scale = lunai_embedding_factor(&c->encoder);
  first.first_position = c->encoder.first_position;
  s = lunai_stream_allocate(ctx, &first, &model->layers[0]);
  if (!s) return NULL;
  lunai_stream_tables(s, model->embedding, model->output, model->positions, &model->norm);
  good = lunai_stream_real(s, s->slots, s->batch, source) &&
      lunai_stream_real(s, s->source_slots, source->batch, source);
  for (i = 0; i < s->sizes.layers && good; i++)
    good = lunai_stream_layer_open(s, i, &model->layers[i], NULL) &&
           lunai_stream_sources(s, &model->layers[i], &s->layers[i], &p, context, source->lengths);
  return lunai_stream_opened(ctx, s, good);
}
#endif

LUNA_API void luna_stream_close(luna_stream *s) {
  if (s && s->memory_size) {
#ifndef LUNA_ONLY_STREAM
    const luna_allocator allocator = s->allocator;
    while (s->ctx.graphs) luna_graph_close(s->ctx.graphs);
    if (s->device_memory) s->ctx.backend->release(s->ctx.self, s->device_memory, s->device_size);
    lunai_raw_release(&allocator, (char *)s - ((char *)s)[-1], s->memory_size);
#endif
  }
}

/* --- running --- */
#ifdef LUNA_ONLY_STREAM
#define LUNAI_GRAPHED(s, n, call) (void)(call)
#else
/* a single token's calls: on a device one launch */
#define LUNAI_GRAPHED(s, n, call) \
  do { \
    luna_graph *graph_ = (n) == 1 ? (s)->ctx.graphs : NULL; \
    (void)luna_graph_begin(graph_); \
    (void)(call); \
    (void)luna_graph_end(graph_); \
  } while (0)
#endif
LUNAI_FN const float *lunai_stream_run(luna_stream *s, const luna_input *input) {
  const int64_t n = input->n;
  luna_tensor *y = NULL;
  int64_t at, i, rows;
  if (!s || !lunai_stream_ready(s)) return NULL;
  if (n < 1 || (s->sizes.features ? !input->features : !input->tokens)) s->error = LUNA_ERROR_STREAM_NO_TOKENS;
  else if (lunai_checked(lunai_checked(n, s->batch), s->sizes.features + 1) < 0 || n > INT64_MAX - s->position)
    s->error = LUNA_ERROR_STREAM_TOO_MANY_TOKENS;
  for (i = 0; !s->error && !s->sizes.features && i < n * s->batch; i++)
    if (input->tokens[i] < 0 || input->tokens[i] >= s->sizes.vocab) s->error = LUNA_ERROR_STREAM_TOKEN;
  if (!s->error && s->sizes.positions == LUNA_POSITIONS_LEARNED && s->position + n > s->sizes.max_length)
    s->error = LUNA_ERROR_STREAM_POSITIONS;
  if (s->error) return NULL;
  for (at = 0; at < n; at += rows) {
    rows = lunai_min(s->chunk, n - at);
    LUNAI_GRAPHED(s, n, y = !lunai_stream_send(s, input, at, rows) ? NULL :
                            lunai_stream_forward(s, rows, at + rows == n));
    s->position += rows;
  }
  if (y) (void)lunai_stream_move(s, s->logits, y->data, (size_t)luna_count(y) * sizeof(float), 2);
  return lunai_stream_ready(s) && y ? s->logits : NULL;
}
LUNAI_FN const float *lunai_stream_one(luna_stream *s, const int32_t *tokens, const float *features) {
  luna_input one;
  memset(&one, 0, sizeof one);
  one.n = 1;
  one.tokens = tokens;
  one.features = features;
  return lunai_stream_run(s, &one);
}
LUNA_API const float *luna_stream_step(luna_stream *s, const int32_t *tokens) {
  return lunai_stream_one(s, tokens, NULL);
}
LUNA_API const float *luna_stream_step_features(luna_stream *s, const float *features) {
  return lunai_stream_one(s, NULL, features);
}
LUNA_API const float *luna_stream_prefill(luna_stream *s, const luna_input *input) {
  if (!s || !lunai_stream_ready(s)) return NULL;
  if (!input || input->lengths || (input->batch != 0 && input->batch != s->batch)) {
    s->error = LUNA_ERROR_STREAM_INPUT;
    return NULL;
  }
  return lunai_stream_run(s, input);
}
LUNA_API luna_error_id luna_stream_error_id(const luna_stream *s) { return s ? s->error : LUNA_ERROR_NO_STREAM; }
LUNA_API const char *luna_stream_error(const luna_stream *s) {
#ifndef LUNA_ONLY_STREAM
  if (s && s->error == LUNA_ERROR_BACKEND) return s->ctx.error;
#endif
  return lunai_sentences[luna_stream_error_id(s)];
}
LUNA_API int64_t luna_stream_position(const luna_stream *s) { return s ? s->position : 0; }

/* --- the state --- */
LUNAI_FN luna_status lunai_stream_fail(luna_stream *s, luna_error_id error) {
  if (s) s->error = error;
  return LUNA_BAD_ARGUMENT;
}
/* ends a call: the device's failure, or no error */
LUNAI_FN luna_status lunai_stream_status(luna_stream *s) {
  (void)lunai_stream_ready(s);
  return s->ctx.status;
}
/* copies the state to host memory */
LUNAI_FN luna_status lunai_stream_read(const luna_stream *s, void *to) {
  luna_ctx *ctx = (luna_ctx *)(uintptr_t)&s->ctx;
  return ctx->status != LUNA_OK ? ctx->status : ctx->backend->copy(ctx, to, s->state, s->state_size, 2);
}

LUNA_API luna_status luna_stream_reorder(luna_stream *s, const int32_t *from) {
  int32_t *order;
  int64_t b;
  if (!s || !from) return lunai_stream_fail(s, LUNA_ERROR_STREAM_ORDER);
  order = lunai_stream_inputs(s, s->host_inputs, 1).tokens;
  for (b = 0; b < s->batch; b++)
    if (from[b] < 0 || from[b] >= s->batch) return lunai_stream_fail(s, LUNA_ERROR_STREAM_ORDER);
  lunai_copy(order, from, (size_t)s->batch * sizeof(int32_t));
  if (s->inputs != s->host_inputs)
    (void)lunai_stream_move(s, lunai_stream_inputs(s, s->inputs, 1).tokens, order, (size_t)s->batch * sizeof(int32_t),
                            1);
  if (lunai_stream_ready(s)) lunai_stream_reorder_all(s);
  return lunai_stream_status(s);
}

LUNAI_FN bool lunai_stream_same(const luna_stream *a, const luna_stream *b) {
  return a->batch == b->batch && memcmp(&a->sizes, &b->sizes, sizeof a->sizes) == 0;
}
LUNA_API luna_status luna_stream_copy(luna_stream *to, const luna_stream *from) {
  luna_status status = LUNA_OK;
  (void)status;
  if (!to || !from || !lunai_stream_same(to, from)) return lunai_stream_fail(to, LUNA_ERROR_STREAM_COPY);
#ifndef LUNA_ONLY_STREAM
  if (lunai_stream_on_device(to) && lunai_stream_on_device(from)) {
    if (to->model_ctx != from->model_ctx) return lunai_stream_fail(to, LUNA_ERROR_STREAM_DEVICES);
    status = from->ctx.status;
    if (status == LUNA_OK) (void)lunai_stream_move(to, to->state, from->state, to->state_size, 0);
  } else
#endif
  if (lunai_stream_on_device(to)) (void)lunai_stream_move(to, to->state, from->state, to->state_size, 1);
  else if (to != from) status = lunai_stream_read(from, to->state);
#ifndef LUNA_ONLY_STREAM
  if (status != LUNA_OK) {
    lunai_print(to->ctx.error, sizeof to->ctx.error, lunai_sentences[LUNA_ERROR_BACKEND], "luna_stream_copy",
                luna_status_text(status));
    return lunai_stream_fail(to, LUNA_ERROR_BACKEND), status;
  }
#endif
  to->position = from->position;
  return lunai_stream_status(to);
}

/* a saved state: a header that identifies the model's sizes, then the state's bytes */
typedef struct lunai_stream_head { uint64_t magic; int64_t batch, position; lunai_lm_sizes sizes; } lunai_stream_head;
#define LUNAI_STREAM_MAGIC 0x316D61657274736Cu /* "lstream1" as this machine reads it */
LUNA_API size_t luna_stream_state_size(const luna_stream *s) {
  return s ? sizeof(lunai_stream_head) + s->state_size : 0;
}
LUNA_API luna_status luna_stream_state_save(const luna_stream *s, void *bytes, size_t size) {
  lunai_stream_head head;
  if (!s || !bytes || size < luna_stream_state_size(s)) return LUNA_BAD_ARGUMENT;
  memset(&head, 0, sizeof head);
  head.magic = LUNAI_STREAM_MAGIC;
  head.batch = s->batch;
  head.position = s->position;
  head.sizes = s->sizes;
  memcpy(bytes, &head, sizeof head);
  return lunai_stream_read(s, (char *)bytes + sizeof head);
}
LUNA_API luna_status luna_stream_state_load(luna_stream *s, const void *bytes, size_t size) {
  lunai_stream_head head;
  if (!s || !bytes || size != luna_stream_state_size(s)) return lunai_stream_fail(s, LUNA_ERROR_STREAM_STATE_SIZE);
  memcpy(&head, bytes, sizeof head);
  if (head.magic != LUNAI_STREAM_MAGIC || head.batch != s->batch || head.position < 0 ||
      head.position > (int64_t)1 << 53 || memcmp(&head.sizes, &s->sizes, sizeof head.sizes) != 0)
    return lunai_stream_fail(s, LUNA_ERROR_STREAM_STATE);
  if (lunai_stream_move(s, s->state, (const char *)bytes + sizeof head, s->state_size, 1)) s->position = head.position;
  return lunai_stream_status(s);
}

/* --- sampling --- */
/* the k-th largest of n numbers, and how many are larger than it */
LUNAI_FN float lunai_kth(const float *x, int64_t n, int64_t k, int64_t *above) {
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

LUNAI_FN double lunai_weight(float logit, float max, float temperature) {
  return (double)lunai_exp1_scalar((logit - max) / temperature);
}
/* The smallest of the largest logits, of those from `limit` on, whose share of the probability reaches p, by bisection.
   above: the sum, of exp(logit - max), over what is `high` or more */
LUNAI_FN float lunai_nucleus(const float *logits, int64_t n, float limit, float max, float temperature, float p) {
  float low = max, high = (float)INFINITY, middle;
  double total = 0, above = 0;
  int64_t i;
  for (i = 0; i < n; i++) {
    if (!(logits[i] >= limit && logits[i] > -(float)INFINITY)) continue;
    if (logits[i] < low) low = logits[i];
    total += lunai_weight(logits[i], max, temperature);
  }
  for (middle = max; middle > low && middle < high; middle = low * 0.5f + (high < max ? high : max) * 0.5f) {
    double sum = above;
    for (i = 0; i < n; i++)
      if (logits[i] >= middle && logits[i] < high) sum += lunai_weight(logits[i], max, temperature);
    if (sum >= (double)p * total) low = middle;
    else {
      above = sum;
      high = middle;
    }
  }
  return low;
}

LUNA_API int32_t luna_sample(const float *logits, int64_t vocab, luna_sampling *sampling) {
  const float temperature = sampling && sampling->temperature != 0 ? sampling->temperature : 1.0f;
  const float top_p = sampling && sampling->top_p != 0 ? sampling->top_p : 1.0f;
  int64_t k = sampling && sampling->top_k != 0 && sampling->top_k < vocab ? sampling->top_k : vocab;
  uint32_t counter[4] = { 0, 0, 0, 0 }, word[4];
  float limit = -INFINITY, max = -INFINITY;
  double total = 0, target;
  int64_t i, above = 0, ties, pass;
  int32_t chosen = -1;
  if (!logits || vocab < 1 || vocab > INT32_MAX || k < 1 || !(temperature > 0 && lunai_is_finite(temperature)))
    return -1;
  if (!(top_p > 0 && top_p <= 1)) return -1;
  for (i = 0; i < vocab; i++) {
    if (logits[i] != logits[i]) return -1;
    if (logits[i] > max || chosen < 0) { max = logits[i]; chosen = (int32_t)i; }
  }
  if (k == 1 || !sampling || max == -INFINITY || max == INFINITY) return chosen;
  if (k < vocab) limit = lunai_kth(logits, vocab, k, &above);
  if (top_p < 1) {
    const float nucleus = lunai_nucleus(logits, vocab, limit, max, temperature, top_p);
    if (nucleus > limit) k = vocab;    /* all that are equal to it */
    limit = nucleus;
  }
  counter[0] = (uint32_t)sampling->drawn;
  counter[1] = (uint32_t)(sampling->drawn >> 32);
  counter[2] = 0x53616D70u;          /* distinct from other uses of the seed */
  lunai_philox(counter, sampling->seed, word);
  sampling->drawn++;
  for (target = 0, pass = 0; pass < 2; pass++) { /* pass 0 sums, pass 1 finds the place in the sum; of equals at the
                                                    limit the first few count */
    double sum = 0;
    for (ties = k - above, i = 0; i < vocab; i++) {
      if (logits[i] < limit || (k < vocab && logits[i] == limit && ties-- <= 0)) continue;
      sum += lunai_weight(logits[i], max, temperature);
      if (pass == 0) continue;
      if (sum > target) return (int32_t)i;
    }
    total = sum;
    target = total * ((double)word[0] + 0.5) / 4294967296.0;
  }
  return chosen;
}

#ifndef LUNA_ONLY_STREAM
/* --- beam search: of each source's `beam` rows the 2 beam likeliest continuations, best first; an end among the first
   `beam` is a result --- */
typedef struct lunai_candidate { double score; int64_t row; int32_t token; } lunai_candidate;
typedef struct lunai_beam {
  luna_beam_config search;
  int64_t batch, vocab, stride;      /* stride: of the caller's rows */
  double penalty;
  double *score, *best;              /* [batch beam] of the unfinished; [batch] best results, normalised */
  int32_t *tokens, *next;            /* [batch beam, max_length] the unfinished, and their copies in the next order */
  int32_t *last, *from, *finished;   /* [batch beam] twice; [batch] */
  lunai_candidate *candidates;       /* [2 beam] */
  int32_t *out, *out_lengths;        /* the caller's */
} lunai_beam;

LUNAI_FN double lunai_log_sum(const float *x, int64_t n) {
  double max = (double)x[0], sum = 0;
  int64_t i;
  for (i = 1; i < n; i++) if ((double)x[i] > max) max = (double)x[i];
  for (i = 0; i < n; i++) sum += (double)lunai_exp1_scalar((float)((double)x[i] - max));
  return max + log(sum);
}
/* finds the likeliest continuations of source b's rows, best first; returns how many */
LUNAI_FN int64_t lunai_beam_candidates(lunai_beam *s, int64_t b, const float *logits, int64_t length) {
  const int64_t room = 2 * s->search.beam, rows = length == 0 ? 1 : s->search.beam;
  int64_t count = 0, row, token, at;
  for (row = b * s->search.beam; row < b * s->search.beam + rows; row++) {
    const float *x = logits + row * s->vocab;
    const double base = s->score[row] - lunai_log_sum(x, s->vocab);
    for (token = 0; token < s->vocab; token++) {
      const double score = base + (double)x[token];
      if (!(score > (double)-INFINITY) || (length == s->search.max_length && token != s->search.end) ||
          (count == room && score <= s->candidates[count - 1].score)) continue;
      if (count < room) count++;
      for (at = count - 1; at > 0 && s->candidates[at - 1].score < score; at--)
        s->candidates[at] = s->candidates[at - 1];
      s->candidates[at].score = score;
      s->candidates[at].row = row;
      s->candidates[at].token = (int32_t)token;
    }
  }
  return count;
}
LUNAI_FN void lunai_beam_finish(lunai_beam *s, int64_t b, const lunai_candidate *c, int64_t length) {
  const double score = c->score / pow((double)(length + 1), s->penalty);
  if (s->finished[b]++ && score <= s->best[b]) return;
  s->best[b] = score;
  s->out_lengths[b] = (int32_t)length;
  memcpy(s->out + b * s->stride, s->tokens + c->row * s->search.max_length, (size_t)length * sizeof(int32_t));
}
/* one step of source b; false when it is finished */
LUNAI_FN bool lunai_beam_step(lunai_beam *s, int64_t b, const float *logits, int64_t length) {
  const int64_t beam = s->search.beam, max = s->search.max_length, count = lunai_beam_candidates(s, b, logits, length);
  int64_t i, kept = 0;
  for (i = 0; i < count && kept < beam; i++) {
    const lunai_candidate *c = &s->candidates[i];
    const int64_t row = b * beam + kept;
    if (c->token == s->search.end) {
      if (i < beam) lunai_beam_finish(s, b, c, length);
      continue;
    }
    memcpy(s->next + row * max, s->tokens + c->row * max, (size_t)length * sizeof(int32_t));
    s->next[row * max + length] = s->last[row] = c->token;
    s->from[row] = (int32_t)c->row;
    kept++;
  }
  for (kept = 0, i = 0; i < count && kept < beam; i++)
    if (s->candidates[i].token != s->search.end) s->score[b * beam + kept++] = s->candidates[i].score;
  for (i = kept; i < beam; i++) s->score[b * beam + i] = (double)-INFINITY;
  if (kept == 0 || (!s->search.exhaustive && s->finished[b] >= beam)) return false;
  return !s->finished[b] || !s->search.exhaustive || s->score[b * beam] / pow((double)(max + 1), s->penalty) >
      s->best[b];
}

LUNAI_FN bool lunai_beam_memory(luna_ctx *ctx, lunai_beam *s) {
  const size_t rows = (size_t)(s->batch * s->search.beam), max = (size_t)s->search.max_length, batch = (size_t)s->batch;
  void *at[8];
  int i;
  size_t size[8];
  size[0] = rows * sizeof(double); size[1] = batch * sizeof(double);
  size[2] = size[3] = rows * max * sizeof(int32_t);
  size[4] = size[5] = rows * sizeof(int32_t); size[6] = batch * sizeof(int32_t);
  size[7] = (size_t)(2 * s->search.beam) * sizeof(lunai_candidate);
  for (i = 0; i < 8; i++) {
    if (!lunai_step(ctx, size[i], false, &at[i])) return false;
    memset(at[i], 0, size[i]);
  }
  s->score = (double *)at[0]; s->best = (double *)at[1];
  s->tokens = (int32_t *)at[2]; s->next = (int32_t *)at[3];
  s->last = (int32_t *)at[4]; s->from = (int32_t *)at[5]; s->finished = (int32_t *)at[6];
  s->candidates = (lunai_candidate *)at[7];
  return true;
}

LUNAI_FN bool lunai_beam_good(luna_ctx *ctx, const lunai_beam *s, const luna_input *source) {
  const char *name = "luna_seq2seq_generate";
  const luna_beam_config *c = &s->search;
  if (!lunai_in(ctx, name, "source->batch", source->batch, 1, LUNAI_MAX_COUNT) ||
      !lunai_in(ctx, name, "source->n", source->n, 0, LUNAI_MAX_COUNT) ||
      !lunai_in(ctx, name, "beam", c->beam, 1, lunai_min(s->vocab, LUNAI_MAX_COUNT / source->batch)) ||
      !lunai_in(ctx, name, "max_length", c->max_length, 1, LUNAI_MAX_COUNT / source->batch / c->beam) ||
      !lunai_in(ctx, name, "begin", c->begin, 0, s->vocab - 1) || !lunai_in(ctx, name, "end", c->end, 0, s->vocab - 1))
    return false;
  if (!lunai_is_finite(c->length_penalty))
    lunai_fail_status(ctx, LUNA_ERROR_NOT_FINITE_ARGUMENT, name, "length_penalty", (double)c->length_penalty);
  return lunai_is_finite(c->length_penalty);
}
LUNA_API luna_status luna_seq2seq_generate(const luna_seq2seq *model, const luna_beam_config *search,
                                           const luna_input *source, int32_t *out,
                                           int32_t *out_lengths, float *scores) {
  luna_ctx *ctx = model && model->params ? model->params->ctx : NULL;
  luna_stream *stream;
  lunai_beam s;
  luna_status status = LUNA_OK;
  const float *logits;
  int32_t *swap;
  int64_t b, i, length, going, batch;
  if (!ctx) return LUNA_BAD_ARGUMENT;
  if (!source) return lunai_fail_status(ctx, LUNA_ERROR_NULL_ARGUMENT, "luna_seq2seq_generate", "source");
  batch = source->batch;
  memset(&s, 0, sizeof s);
  if (search) s.search = *search;
  if (s.search.beam == 0) s.search.beam = 1;
  if (s.search.max_length == 0) s.search.max_length = lunai_checked(2, source->n) + 10; /* negative n: an error below */
  s.stride = s.search.max_length;
  if (model->positions) s.search.max_length = lunai_min(s.search.max_length, model->config.max_target_length - 1);
  s.batch = batch;
  s.vocab = model->config.target_vocab;
  s.penalty = s.search.length_penalty == 0 ? 1 : s.search.length_penalty < 0 ? 0 : (double)s.search.length_penalty;
  s.out = out;
  s.out_lengths = out_lengths;
  if (!lunai_is_given(ctx, "luna_seq2seq_generate", "search, out or out_lengths", search && out && out_lengths) ||
      !lunai_beam_good(ctx, &s, source)) return ctx->last_status;
  stream = luna_seq2seq_stream_open(model, source, s.search.beam);
  if (!stream) return ctx->status == LUNA_OK ? LUNA_OUT_OF_MEMORY : ctx->status;
  if (!lunai_beam_memory(ctx, &s))
    status = lunai_fail_memory(ctx, "luna_seq2seq_generate",
                               (size_t)(batch * s.search.beam * s.search.max_length) * sizeof(int32_t));
  for (i = 0; i < batch * s.search.beam && status == LUNA_OK; i++) s.last[i] = s.search.begin;
  for (b = 0; b < batch && status == LUNA_OK; b++) out_lengths[b] = 0;
  for (going = batch, length = 0; status == LUNA_OK && going > 0 && length <= s.search.max_length; length++) {
    logits = luna_stream_step(stream, s.last);
    if (!logits && stream->ctx.status != LUNA_OK) status = lunai_stream_report(ctx, stream, "luna_seq2seq_generate");
    else if (!logits)
      status = lunai_fail_status(ctx, LUNA_ERROR_STREAM_CONFIG, "luna_seq2seq_generate", luna_stream_error(stream));
    for (going = 0, b = 0; b < batch && logits; b++) {
      const int64_t first = b * s.search.beam;
      for (i = first; i < first + s.search.beam; i++) s.from[i] = (int32_t)i;
      if (s.finished[b] >= 0 && !lunai_beam_step(&s, b, logits, length)) {
        if (s.finished[b] == 0) status = lunai_fail_status(ctx, LUNA_ERROR_LOGITS_NOT_FINITE, b);
        s.finished[b] = -1;
      }
      going += s.finished[b] >= 0;
    }
    swap = s.tokens;
    s.tokens = s.next;
    s.next = swap;
    if (status == LUNA_OK && going > 0) luna_stream_reorder(stream, s.from);
  }
  for (b = 0; b < batch && scores && status == LUNA_OK; b++) scores[b] = (float)s.best[b];
  luna_stream_close(stream);
  return status;
}
#endif /* !LUNA_ONLY_STREAM */

#if defined(__cplusplus) && defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#endif
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC pop_options
#endif
#endif /* !LUNAI_PASS */
#endif /* LUNA_IMPLEMENTATION */
