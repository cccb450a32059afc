// A Llama's weights and the forward pass of one step, in phases. A phase begins when all pieces of the last are done.
#pragma once
#include "attention.h"
#include "linear.h"
#include "pool.h"

// What Python hands over at the start. Every width is a multiple of 16.
struct Shape {
    int32_t layers, width, heads, kv_heads, head_dim, mlp_width, vocab_size;
    int32_t num_blocks, block_size, max_positions, threads;
    float norm_eps;
};

// One step, as Python hands it over; see `refold.gpu.native`.
struct Step {
    int32_t num_rows, num_items, num_sampled;
    const int32_t *token_ids, *positions, *slots, *sampled;
    const int32_t* items;   // (num_items, 4): first row, first position, tokens, start of the block table in `blocks`
    const int32_t* blocks;
    float* logits;          // (num_sampled, vocab_size)
    int32_t only_linears;   // leave everything else out: what the products alone take
};

enum class After { KEEP, ADD, GATE };

// Stored: what the embedding and the cache are made of.
template <typename Weight, typename Stored>
class Model {
    typedef typename InputOf<Weight>::Type Input;
    static constexpr bool IS_QUANTISED = sizeof(Input) == 1;

  public:
    Model(const Shape& shape, const float* cosines, const float* sines, const Stored* embedding, Stored* cache)
        : shape_(shape), pool_(shape.threads), cosines_(cosines), sines_(sines), embedding_(embedding), cache_(cache) {
        attention_ = {shape.heads, shape.kv_heads, shape.head_dim, shape.block_size,
                      size_t(shape.num_blocks) * shape.block_size * shape.head_dim};
        layers_ = new Layer[shape.layers];
    }

    ~Model() {
        delete[] layers_;
        std::free(scratch_);
    }

    int threads() const { return pool_.threads(); }

    // Kinds: 0 attention norm, 1 query/key/value, 2 output, 3 MLP norm, 4 gate/up, 5 down; 6 final norm, 7 LM head.
    bool set_weight(int layer, int kind, const float* data) {
        int query = shape_.heads * shape_.head_dim, all = query + 2 * shape_.kv_heads * shape_.head_dim;
        Layer& one = layers_[layer];
        switch (kind) {
            case 0: one.attention_norm = data; return true;
            case 1: return one.query_key_value.pack(data, all, shape_.width, false);
            case 2: return one.output.pack(data, shape_.width, query, false);
            case 3: one.mlp_norm = data; return true;
            case 4: return one.gate_up.pack(data, 2 * shape_.mlp_width, shape_.width, true);
            case 5: return one.down.pack(data, shape_.width, shape_.mlp_width, false);
            case 6: final_norm_ = data; return true;
            case 7: return lm_head_.pack(data, shape_.vocab_size, shape_.width, false);
        }
        return false;
    }

    bool run(const Step& step) {
        if (!reserve(step.num_rows > step.num_sampled ? step.num_rows : step.num_sampled)) return false;
        step_ = &step;
        pool_.run([](void* self, int thread) { static_cast<Model*>(self)->compute(thread); }, this, 10 * shape_.layers + 4);
        return true;
    }

  private:
    struct Layer {
        const float *attention_norm, *mlp_norm;
        Packed<Weight> query_key_value, output, gate_up, down;
    };

    // All memory of a step, in one piece: rows of floats, rows of inputs and their scales, each thread's own.
    bool reserve(int rows) {
        if (rows <= reserved_) return true;
        const size_t query = size_t(shape_.heads) * shape_.head_dim, all = query + 2 * size_t(shape_.kv_heads) * shape_.head_dim;
        const size_t width = shape_.width, mlp = shape_.mlp_width, wanted = size_t(rows) + rows / 4 + 16;
        const size_t per_row = width + all + 2 * (query + mlp) + width + 3;
        own_stride_ = (attention_scratch_floats(attention_) + width + 31) / 16 * 16;
        std::free(scratch_);
        reserved_ = 0;
        scratch_ = static_cast<float*>(aligned_memory(sizeof(float) * (per_row * wanted + own_stride_ * pool_.threads())));
        if (!scratch_) return false;
        float* next = scratch_;
        auto floats = [&](size_t columns) { float* found = next; next += columns * wanted; return found; };
        hidden_ = floats(width);
        heads_ = floats(all);
        mixed_floats_ = floats(query);
        gated_floats_ = floats(mlp);
        const int widths[] = {int(width), int(query), int(mlp)};
        Rows<Input>* operands[] = {&normed_, &mixed_, &gated_};
        for (int at = 0; at < 3; at++) {
            operands[at]->data = reinterpret_cast<Input*>(floats(widths[at]));
            operands[at]->scales = floats(1);
            operands[at]->inputs = widths[at];
        }
        own_ = next;
        reserved_ = int(wanted);
        return true;
    }

    void compute(int thread) {
        const Step& step = *step_;
        const int rows = step.num_rows;
        int phase = 0;
        each_row(phase, rows, [&](int row) { embed(row); });
        for (int number = 0; number < shape_.layers; number++) {
            const Layer& layer = layers_[number];
            each_row(phase, rows, [&](int row) { norm(row, row, layer.attention_norm, thread); });
            product(phase, layer.query_key_value, normed_, rows, heads_, After::KEEP);
            each_row(phase, rows, [&](int row) { place(number, row); });
            attend(phase, number, thread);
            narrow_rows(phase, rows, mixed_floats_, mixed_);
            product(phase, layer.output, mixed_, rows, hidden_, After::ADD);
            each_row(phase, rows, [&](int row) { norm(row, row, layer.mlp_norm, thread); });
            product(phase, layer.gate_up, normed_, rows, nullptr, After::GATE);
            narrow_rows(phase, rows, gated_floats_, gated_);
            product(phase, layer.down, gated_, rows, hidden_, After::ADD);
        }
        each_row(phase, step.num_sampled, [&](int at) { norm(step.sampled[at], at, final_norm_, thread); });
        product(phase, lm_head_, normed_, step.num_sampled, step.logits, After::KEEP);
    }

    template <typename Job>
    void each_row(int& phase, int rows, Job job) {
        if (step_->only_linears) return;
        pool_.share(phase++, rows, job);
    }

    void embed(int row) {
        const Stored* from = embedding_ + size_t(step_->token_ids[row]) * shape_.width;
        float* to = hidden_ + size_t(row) * shape_.width;
        for (int at = 0; at < shape_.width; at += LANES) store(to + at, load(from + at));
    }

    // Root mean square norm of row `from` of hidden into row `to` of the operand.
    void norm(int from, int to, const float* weight, int thread) {
        const float* row = hidden_ + size_t(from) * shape_.width;
        float* floats = own_ + own_stride_ * thread;
        Floats squares = {};
        for (int at = 0; at < shape_.width; at += LANES) squares = fused(load(row + at), load(row + at), squares);
        Floats scale = splat(1.0f / std::sqrt(total(squares) / shape_.width + shape_.norm_eps));
        for (int at = 0; at < shape_.width; at += LANES) {
            Floats value = load(row + at) * scale * load(weight + at);
            if constexpr (IS_QUANTISED) store(floats + at, value);
            else store(normed_.row(to) + at, value);
        }
        if constexpr (IS_QUANTISED) quantise(floats, shape_.width, normed_.row(to), normed_.scales + to);
    }

    // Rows that must be whole before they can be made narrow.
    void narrow_rows(int& phase, int rows, const float* from, Rows<Input>& to) {
        if constexpr (IS_QUANTISED)
            each_row(phase, rows, [&](int row) { quantise(from + size_t(row) * to.inputs, to.inputs, to.row(row), to.scales + row); });
    }

    // Rotary embedding of a row's queries (scaled as well) and keys; keys and values go to the cache.
    void place(int layer, int row) {
        const int dims = shape_.head_dim, half = dims / 2, size = shape_.block_size, slot = step_->slots[row];
        const float* cosines = cosines_ + size_t(step_->positions[row]) * half;
        const float* sines = sines_ + size_t(step_->positions[row]) * half;
        float* head = heads_ + size_t(row) * (shape_.heads + 2 * shape_.kv_heads) * dims;
        const float scale = 1.0f / std::sqrt(float(dims));
        for (int number = 0; number < shape_.heads + shape_.kv_heads; number++, head += dims) {
            float factor = number < shape_.heads ? scale : 1.0f;
            for (int at = 0; at < half; at++) {
                float low = head[at], high = head[at + half];
                head[at] = (low * cosines[at] - high * sines[at]) * factor;
                head[at + half] = (high * cosines[at] + low * sines[at]) * factor;
            }
        }
        const size_t block = size_t(slot / size) * size * dims, offset = slot % size;
        for (int number = 0; number < shape_.kv_heads; number++) {
            Stored* keys = plane(layer, number) + block + offset;
            Stored* values = plane(layer, shape_.kv_heads + number) + block + offset * dims;
            const float* key = head + (number - shape_.kv_heads) * dims;
            const float* value = head + number * dims;
            for (int at = 0; at < dims; at++) narrow(keys + size_t(at) * size, key[at]);
            for (int at = 0; at < dims; at++) narrow(values + at, value[at]);
        }
    }

    Stored* plane(int layer, int number) { return cache_ + (size_t(layer) * 2 * shape_.kv_heads + number) * attention_.plane; }

    void attend(int& phase, int layer, int thread) {
        if (step_->only_linears) return;
        const int heads = shape_.kv_heads, group = shape_.heads / heads, dims = shape_.head_dim;
        const int stride = (shape_.heads + 2 * heads) * dims, output_stride = shape_.heads * dims;
        pool_.share(phase++, step_->num_items * heads, [&](int piece) {
            const int32_t* numbers = step_->items + 4 * (piece / heads);
            AttentionItem item = {numbers[0], numbers[1], numbers[2], step_->blocks + numbers[3]};
            int head = piece % heads;
            attend_item(attention_, item, plane(layer, head), plane(layer, heads + head),
                        heads_ + size_t(item.first_row) * stride + head * group * dims, stride,
                        mixed() + size_t(item.first_row) * output_stride + head * group * dims, output_stride,
                        own_ + own_stride_ * thread);
        });
    }

    // Where attention and the gate put their results: the next product's operand, unless that needs whole rows first.
    auto mixed() {
        if constexpr (IS_QUANTISED) return mixed_floats_;
        else return mixed_.data;
    }

    auto gated() {
        if constexpr (IS_QUANTISED) return gated_floats_;
        else return gated_.data;
    }

    // A piece is one panel for up to CHUNK_ROWS rows.
    void product(int& phase, const Packed<Weight>& weight, const Rows<Input>& rows, int num_rows, float* to, After after) {
        const int chunks = (num_rows + CHUNK_ROWS - 1) / CHUNK_ROWS, panels = weight.panels();
        pool_.share(phase++, chunks * panels, [&](int piece) {
            int chunk = piece / panels, panel = piece % panels;
            int first = int(int64_t(num_rows) * chunk / chunks), last = int(int64_t(num_rows) * (chunk + 1) / chunks);
            int blocks = (last - first + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
            for (int block = 0; block < blocks; block++) {
                int start = first + (last - first) * block / blocks, stop = first + (last - first) * (block + 1) / blocks;
                alignas(64) float tile[MAX_BLOCK_ROWS * COLUMNS];
                multiply(stop - start, rows, start, weight, panel, tile);
                for (int row = start; row < stop; row++) finish(tile + (row - start) * COLUMNS, weight.outputs, row, panel, to, after);
            }
        });
    }

    void finish(const float* tile, int outputs, int row, int panel, float* to, After after) {
        if (after == After::GATE) {
            Floats gate = load(tile), up = load(tile + LANES);
            store(gated() + size_t(row) * (outputs / 2) + panel * LANES, gate / (splat(1.0f) + exponential(-gate)) * up);
            return;
        }
        to += size_t(row) * outputs + panel * COLUMNS;
        for (int half = 0; half < 2 && panel * COLUMNS + half * LANES < outputs; half++, to += LANES, tile += LANES)
            store(to, after == After::ADD ? load(to) + load(tile) : load(tile));
    }

    Shape shape_;
    Pool pool_;
    AttentionShape attention_;
    const float *cosines_, *sines_, *final_norm_ = nullptr;
    const Stored* embedding_;
    Stored* cache_;
    Layer* layers_;
    Packed<Weight> lm_head_;
    const Step* step_ = nullptr;
    float *scratch_ = nullptr, *hidden_ = nullptr, *heads_ = nullptr, *mixed_floats_ = nullptr, *gated_floats_ = nullptr, *own_ = nullptr;
    Rows<Input> normed_, mixed_, gated_;
    size_t own_stride_ = 0;
    int reserved_ = 0;
};
